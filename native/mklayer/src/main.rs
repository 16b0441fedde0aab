//! `dsec-mklayer`: makes one layer, an EROFS metadata file and a data blob, without unpacking anything.
//!
//! Its sources are tar archives; or the writable layer of a sandbox, a directory; or layers made earlier, which become one. For archives and layers
//! it needs no privilege, for a directory the capabilities to read all of it (DAC_READ_SEARCH, and SYS_ADMIN for `trusted.*`).
//!
//! The design has layers made by mkfs.erofs. This program stands in for it: Debian 12's version (1.5) can't read tars, and unpacking one to
//! disk faithfully (owners, devices, capabilities) needs root. Writing the format directly needs neither, reads every byte once, and hands the
//! kernel only what this program itself has composed: nothing of a source is taken over but names, numbers and contents, each checked.
//! Before it reads anything it gives up every system call but those for its open files (`confine`).
//!
//! Several archives, or layers, are collapsed into one, lowest first; whiteouts are kept as overlayfs wants them. With `--check` nothing is made: it
//! says whether a metadata file that came from elsewhere is what this program would have written.
//! Result: one JSON line on stdout. Errors: one line on stderr, no output files, exit code 1 (source refused), 2 (usage), 3 (system).

mod archive;
mod blob;
mod check;
mod confine;
mod convert;
mod directory;
mod erofs;
mod error;
mod extents;
mod globs;
mod image;
mod limits;
mod tree;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use confine::{confine, Scope};
use convert::Converter;
use directory::Removed;
use erofs::{BlobRef, Metadata};
use error::{LayerError, Result};
use globs::Globs;
use limits::Limits;

const USAGE: &str =
    "usage: dsec-mklayer --meta FILE --blob FILE [--at /PATH] [LIMIT…] [--below META [--data BLOB]]… [TAR…]
       dsec-mklayer --meta FILE --blob FILE [LIMIT…] --layer META [--data BLOB] [--layer …]
       dsec-mklayer --directory-fd N --meta-fd N --blob-fd N [--exclude GLOB]… [LIMIT…]
       dsec-mklayer --meta FILE --blob FILE [LIMIT…] --cover META [--cover …]
       dsec-mklayer --check META [LIMIT…]
Makes one EROFS layer of uncompressed tar archives (none given, or -: stdin), of other layers (both: lowest first), or of the directory open at a
descriptor, and writes it to new files or to empty ones that are open. --below: layers under the archives (lowest first), to which these may have hard
links and through whose symbolic links their names may lead. --cover: makes a layer of the
directories whose attributes an overlay of these layers (lowest first) would take from one that doesn't name them. --check: refuses metadata that this program wouldn't have written. LIMIT: --max-entries N, --max-depth N, --max-bytes N, --max-meta N.";

struct Options {
    limits: Limits,
    work: Work,
}

enum Work {
    Make {
        output: OutputPlace,
        source: SourcePlace,
    },
    Check(PathBuf),
}

enum OutputPlace {
    Files { meta: PathBuf, blob: PathBuf },
    Descriptors { meta: RawFd, blob: RawFd },
}

/// Metadata and blob.
type LayerFiles = (PathBuf, Option<PathBuf>);

enum SourcePlace {
    Archives {
        at: Vec<u8>,
        paths: Vec<PathBuf>,
        below: Vec<LayerFiles>,
    },
    Layers(Vec<LayerFiles>),
    Cover(Vec<PathBuf>),
    Directory {
        top: RawFd,
        exclude: Vec<String>,
    },
}

fn parse_options(arguments: impl Iterator<Item = String>) -> Result<Options> {
    let usage = |what: String| LayerError::Usage(format!("{what}\n{USAGE}"));
    let (mut meta, mut blob, mut at) = (None, None, String::from("/"));
    let (mut meta_fd, mut blob_fd, mut directory_fd) = (None, None, None);
    let mut limits = Limits::default();
    let mut check = None;
    let mut archives = Vec::new();
    let (mut layers, mut below): (Vec<LayerFiles>, Vec<LayerFiles>) = Default::default();
    let mut cover = Vec::new();
    let mut data_is_below = false;
    let mut exclude = Vec::new();
    let mut arguments = arguments;
    while let Some(option) = arguments.next() {
        if option == "-" || !option.starts_with('-') {
            archives.push(PathBuf::from(option));
            continue;
        }
        let value = arguments
            .next()
            .ok_or_else(|| usage(format!("{option} needs a value")))?;
        let number = || {
            value
                .parse::<u64>()
                .map_err(|_| usage(format!("{option}: \"{value}\" is no number")))
        };
        let descriptor = || {
            number()?
                .try_into()
                .map_err(|_| usage(format!("{option}: \"{value}\" is no descriptor")))
        };
        match option.as_str() {
            "--check" => check = Some(PathBuf::from(value)),
            "--meta" => meta = Some(PathBuf::from(value)),
            "--blob" => blob = Some(PathBuf::from(value)),
            "--meta-fd" => meta_fd = Some(descriptor()?),
            "--blob-fd" => blob_fd = Some(descriptor()?),
            "--directory-fd" => directory_fd = Some(descriptor()?),
            "--exclude" => exclude.push(value),
            "--layer" | "--below" => {
                data_is_below = option == "--below";
                let list = if data_is_below {
                    &mut below
                } else {
                    &mut layers
                };
                list.push((PathBuf::from(value), None));
            }
            "--data" => {
                let list = if data_is_below {
                    &mut below
                } else {
                    &mut layers
                };
                match list.last_mut() {
                    Some((_, data @ None)) => *data = Some(PathBuf::from(value)),
                    _ => return Err(usage("--data stands behind its --layer or --below".into())),
                }
            }
            "--cover" => cover.push(PathBuf::from(value)),
            "--at" => at = value,
            "--max-entries" => limits.entries = number()?,
            // Trees are walked recursively where they are merged.
            "--max-depth" => limits.depth = number()?.min(2048) as usize,
            "--max-bytes" => limits.data_bytes = number()?,
            "--max-meta" => limits.meta_bytes = number()?,
            _ => return Err(usage(format!("unknown option {option}"))),
        }
    }
    if let Some(metadata) = check {
        let work = Work::Check(metadata);
        return Ok(Options { limits, work });
    }
    let output = match (meta, blob, meta_fd, blob_fd) {
        (Some(meta), Some(blob), None, None) => OutputPlace::Files { meta, blob },
        (None, None, Some(meta), Some(blob)) => OutputPlace::Descriptors { meta, blob },
        _ => {
            return Err(usage(
                "--meta and --blob, or both as descriptors, are needed".into(),
            ))
        }
    };
    let source = match directory_fd {
        Some(top) if archives.is_empty() && layers.is_empty() && below.is_empty() => {
            SourcePlace::Directory { top, exclude }
        }
        None if !exclude.is_empty() => {
            return Err(usage("--exclude goes with --directory-fd".into()))
        }
        None if !below.is_empty() && !layers.is_empty() => {
            return Err(usage("--below goes with archives".into()))
        }
        None if !cover.is_empty()
            && archives.is_empty()
            && layers.is_empty()
            && below.is_empty() =>
        {
            SourcePlace::Cover(cover)
        }
        _ if !cover.is_empty() => return Err(usage("--cover goes with nothing else".into())),
        None if archives.is_empty() && !layers.is_empty() => SourcePlace::Layers(layers),
        None if layers.is_empty() => {
            if archives.is_empty() {
                archives.push(PathBuf::from("-"));
            }
            SourcePlace::Archives {
                at: at.into_bytes(),
                paths: archives,
                below,
            }
        }
        _ => return Err(usage("archives, layers or a directory: one of them".into())),
    };
    let work = Work::Make { output, source };
    Ok(Options { limits, work })
}

/// A file that is removed again unless it is kept.
struct Output {
    path: PathBuf,
    kept: bool,
}

impl Output {
    fn create(path: &Path) -> Result<(Output, File)> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|source| LayerError::Io {
                what: format!("creating {}", path.display()),
                source,
            })?;
        let output = Output {
            path: path.to_owned(),
            kept: false,
        };
        Ok((output, file))
    }
}

impl Output {
    /// Puts the file in the place of another one, to which it belongs from here on.
    fn rename(&mut self, path: &Path) -> Result<()> {
        fs::rename(&self.path, path).map_err(|source| LayerError::Io {
            what: format!("replacing {}", path.display()),
            source,
        })?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.kept {
            // Best effort on a path that already carries an error.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn open_file(path: &Path) -> Result<File> {
    File::open(path).map_err(|source| LayerError::Io {
        what: format!("opening {}", path.display()),
        source,
    })
}

fn open_archive(path: &Path) -> Result<Box<dyn Read>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdin().lock()));
    }
    Ok(Box::new(open_file(path)?))
}

/// A descriptor that whoever started this program left open for it.
fn inherited(number: RawFd) -> Result<OwnedFd> {
    // SAFETY: fcntl takes any number; one that is open was given to nobody else here.
    unsafe {
        if number < 3 || libc::fcntl(number, libc::F_GETFD) < 0 {
            return Err(LayerError::Usage(format!(
                "descriptor {number} isn't open for this program"
            )));
        }
        Ok(OwnedFd::from_raw_fd(number))
    }
}

/// Metadata, read, and blob.
type OpenLayer = (Vec<u8>, Option<File>);

/// What is read, open.
enum Source {
    Archives {
        archives: Vec<Box<dyn Read>>,
        below: Vec<OpenLayer>,
    },
    Layers(Vec<OpenLayer>),
    Cover(Vec<Vec<u8>>),
    Directory(OwnedFd, Globs),
}

fn open_source(place: &SourcePlace, limits: &Limits) -> Result<Source> {
    Ok(match place {
        SourcePlace::Archives { paths, below, .. } => Source::Archives {
            archives: paths
                .iter()
                .map(|path| open_archive(path))
                .collect::<Result<_>>()?,
            below: open_layers(below, limits)?,
        },
        SourcePlace::Layers(layers) => Source::Layers(open_layers(layers, limits)?),
        SourcePlace::Cover(stack) => Source::Cover(
            stack
                .iter()
                .map(|path| read_metadata(path, limits))
                .collect::<Result<_>>()?,
        ),
        SourcePlace::Directory { top, exclude } => {
            Source::Directory(inherited(*top)?, Globs::new(exclude)?)
        }
    })
}

fn open_layers(layers: &[LayerFiles], limits: &Limits) -> Result<Vec<OpenLayer>> {
    let open = |(meta, data): &LayerFiles| {
        let data = data.as_deref().map(open_file).transpose()?;
        Ok((read_metadata(meta, limits)?, data))
    };
    layers.iter().map(open).collect()
}

fn read_metadata(path: &Path, limits: &Limits) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(path)?
        .take(limits.meta_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| LayerError::Io {
            what: format!("reading {}", path.display()),
            source,
        })?;
    if bytes.len() as u64 > limits.meta_bytes {
        return Err(LayerError::input(format!(
            "{} has more than {} bytes",
            path.display(),
            limits.meta_bytes
        )));
    }
    Ok(bytes)
}

/// The files of the layer that is made, and of a second try at its blob.
struct Outputs {
    meta: File,
    blob: File,
    spare: Option<File>,
    /// By name, where they have one: metadata, blob, spare.
    named: Option<[Output; 3]>,
}

fn open_outputs(place: &OutputPlace) -> Result<Outputs> {
    Ok(match place {
        OutputPlace::Files { meta, blob } => {
            let (meta_output, meta) = Output::create(meta)?;
            let (blob_output, blob_file) = Output::create(blob)?;
            let (spare_output, spare) = Output::create(&blob.with_extension("spare"))?;
            Outputs {
                meta,
                blob: blob_file,
                spare: Some(spare),
                named: Some([meta_output, blob_output, spare_output]),
            }
        }
        OutputPlace::Descriptors { meta, blob } => Outputs {
            meta: inherited(*meta)?.into(),
            blob: inherited(*blob)?.into(),
            spare: None,
            named: None,
        },
    })
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

fn run(options: &Options) -> Result<String> {
    match &options.work {
        Work::Make { output, source } => make(output, source, &options.limits),
        Work::Check(metadata) => check_file(metadata, &options.limits),
    }
}

fn check_file(path: &Path, limits: &Limits) -> Result<String> {
    let metadata = read_metadata(path, limits)?;
    confine(limits, Scope::OpenFiles, &[])?;
    let checked = check::check(&metadata, limits)?;
    Ok(report(&Report {
        metadata: &checked.metadata,
        blob: checked.blob.as_ref(),
        entries: checked.entries,
        dropped_xattrs: 0,
        removed: &[],
    }))
}

fn make(output: &OutputPlace, source_place: &SourcePlace, limits: &Limits) -> Result<String> {
    let source = open_source(source_place, limits)?;
    let mut outputs = open_outputs(output)?;
    let at: &[u8] = match source_place {
        SourcePlace::Archives { at, .. } => at,
        SourcePlace::Layers(_) | SourcePlace::Cover(_) | SourcePlace::Directory { .. } => b"/",
    };
    let scope = match &source {
        Source::Directory(top, _) => Scope::Directory(top.as_raw_fd()),
        Source::Archives { .. } | Source::Layers(_) | Source::Cover(_) => Scope::OpenFiles,
    };
    match output {
        OutputPlace::Files { meta, blob } => {
            confine(limits, scope, &[directory_of(meta), directory_of(blob)])?
        }
        OutputPlace::Descriptors { .. } => confine(limits, scope, &[])?,
    }

    let mut converter = Converter::new(limits.clone(), at, outputs.blob)?;
    let mut removed = Vec::new();
    match source {
        Source::Archives { archives, below } => {
            below
                .into_iter()
                .try_for_each(|(metadata, data)| converter.add_ground(&metadata, data))?;
            archives
                .into_iter()
                .try_for_each(|archive| converter.add_layer(archive))?;
        }
        Source::Layers(layers) => layers
            .into_iter()
            .try_for_each(|(metadata, data)| converter.add_image(&metadata, data))?,
        Source::Cover(stack) => converter.cover(&stack)?,
        Source::Directory(top, globs) => removed = converter.add_directory(top, &globs)?,
    }
    let converted = converter.finish(outputs.spare)?;
    outputs
        .meta
        .write_all(&converted.metadata.image)
        .and_then(|()| outputs.meta.sync_all())
        .and_then(|()| converted.blob_file.sync_all())
        .map_err(|source| LayerError::Io {
            what: "writing the layer".into(),
            source,
        })?;
    if let Some([meta, blob, spare]) = &mut outputs.named {
        if converted.compacted {
            spare.rename(&blob.path)?;
        }
        meta.kept = true;
        blob.kept = converted.blob.is_some();
    }
    Ok(report(&Report {
        metadata: &converted.metadata,
        blob: converted.blob.as_ref(),
        entries: converted.entries,
        dropped_xattrs: converted.dropped_xattrs,
        removed: &removed,
    }))
}

/// What is told of a layer that was made or checked.
struct Report<'a> {
    metadata: &'a Metadata,
    blob: Option<&'a BlobRef>,
    entries: u64,
    dropped_xattrs: u64,
    removed: &'a [Removed],
}

fn report(layer: &Report<'_>) -> String {
    let removed: Vec<[u64; 2]> = layer
        .removed
        .iter()
        .map(|one| [one.entries, one.bytes])
        .collect();
    let (blob, blob_bytes) = match layer.blob {
        Some(blob) => (
            format!("\"{}\"", erofs::hex(&blob.digest)),
            u64::from(blob.blocks) * blob::BLOCK,
        ),
        None => ("null".into(), 0),
    };
    format!(
        "{{\"meta\":\"{}\",\"meta_bytes\":{},\"blob\":{blob},\"blob_bytes\":{blob_bytes},\"entries\":{},\"inodes\":{},\"extra_ids\":{:?},\"unnamed\":{},\"dropped_xattrs\":{},\"removed\":{removed:?}}}",
        erofs::hex(&layer.metadata.digest),
        layer.metadata.image.len(),
        layer.entries,
        layer.metadata.inodes,
        layer.metadata.extra_ids,
        layer.metadata.unnamed,
        layer.dropped_xattrs,
    )
}

fn main() {
    let result = parse_options(std::env::args().skip(1)).and_then(|options| run(&options));
    match result {
        Ok(line) => println!("{line}"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(error.exit_code());
        }
    }
}
