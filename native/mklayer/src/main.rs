//! `dsec-mklayer`: turns tar archives into one layer, an EROFS metadata file and a data blob, without unpacking anything and without privilege.
//!
//! The design has layers made by mkfs.erofs. This program stands in for it: Debian 12's version (1.5) can't read tars, and unpacking one to
//! disk faithfully (owners, devices, capabilities) needs root. Writing the format directly needs neither, reads every byte once, and hands the
//! kernel only what this program itself has composed: nothing of the archive is taken over but names, numbers and contents, each checked.
//! Before it reads anything it gives up every system call but those for its open files (`confine`).
//!
//! Several archives are collapsed into one layer, lowest first; whiteouts are kept as overlayfs wants them.
//! Result: one JSON line on stdout. Errors: one line on stderr, no output files, exit code 1 (archive refused), 2 (usage), 3 (system).

mod archive;
mod blob;
mod confine;
mod convert;
mod erofs;
mod error;
mod extents;
mod limits;
mod tree;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use confine::confine;
use convert::{Converted, Converter};
use error::{LayerError, Result};
use limits::Limits;

const USAGE: &str =
    "usage: dsec-mklayer --meta FILE --blob FILE [--at /PATH] [--max-entries N] [--max-depth N] [--max-bytes N] [--max-meta N] [TAR…]
Reads uncompressed tar archives (none given, or -: stdin), lowest layer first, and writes one EROFS layer.";

struct Options {
    meta: PathBuf,
    blob: PathBuf,
    at: Vec<u8>,
    limits: Limits,
    archives: Vec<PathBuf>,
}

fn parse_options(arguments: impl Iterator<Item = String>) -> Result<Options> {
    let usage = |what: String| LayerError::Usage(format!("{what}\n{USAGE}"));
    let (mut meta, mut blob, mut at) = (None, None, String::from("/"));
    let mut limits = Limits::default();
    let mut archives = Vec::new();
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
        match option.as_str() {
            "--meta" => meta = Some(PathBuf::from(value)),
            "--blob" => blob = Some(PathBuf::from(value)),
            "--at" => at = value,
            "--max-entries" => limits.entries = number()?,
            // Trees are walked recursively where they are merged.
            "--max-depth" => limits.depth = number()?.min(2048) as usize,
            "--max-bytes" => limits.data_bytes = number()?,
            "--max-meta" => limits.meta_bytes = number()?,
            _ => return Err(usage(format!("unknown option {option}"))),
        }
    }
    if archives.is_empty() {
        archives.push(PathBuf::from("-"));
    }
    Ok(Options {
        meta: meta.ok_or_else(|| usage("--meta is missing".into()))?,
        blob: blob.ok_or_else(|| usage("--blob is missing".into()))?,
        at: at.into_bytes(),
        limits,
        archives,
    })
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

fn open_archive(path: &Path) -> Result<Box<dyn Read>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdin().lock()));
    }
    let file = File::open(path).map_err(|source| LayerError::Io {
        what: format!("opening {}", path.display()),
        source,
    })?;
    Ok(Box::new(file))
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

fn run(options: &Options) -> Result<String> {
    let archives = options
        .archives
        .iter()
        .map(|path| open_archive(path))
        .collect::<Result<Vec<_>>>()?;
    let (mut meta_output, mut meta_file) = Output::create(&options.meta)?;
    let (mut blob_output, blob_file) = Output::create(&options.blob)?;
    let (mut spare_output, spare_file) = Output::create(&options.blob.with_extension("spare"))?;
    confine(
        &options.limits,
        &[directory_of(&options.meta), directory_of(&options.blob)],
    )?;

    let mut converter = Converter::new(options.limits.clone(), &options.at, blob_file)?;
    for archive in archives {
        converter.add_layer(archive)?;
    }
    let converted = converter.finish(spare_file)?;
    meta_file
        .write_all(&converted.metadata.image)
        .and_then(|()| meta_file.sync_all())
        .and_then(|()| converted.blob_file.sync_all())
        .map_err(|source| LayerError::Io {
            what: "writing the layer".into(),
            source,
        })?;
    if converted.compacted {
        spare_output.rename(&blob_output.path)?;
    }
    meta_output.kept = true;
    blob_output.kept = converted.blob.is_some();
    Ok(report(&converted))
}

fn report(converted: &Converted) -> String {
    let (blob, blob_bytes) = match &converted.blob {
        Some(blob) => (
            format!("\"{}\"", erofs::hex(&blob.digest)),
            u64::from(blob.blocks) * blob::BLOCK,
        ),
        None => ("null".into(), 0),
    };
    format!(
        "{{\"meta\":\"{}\",\"meta_bytes\":{},\"blob\":{blob},\"blob_bytes\":{blob_bytes},\"entries\":{},\"inodes\":{},\"extra_ids\":{:?},\"dropped_xattrs\":{}}}",
        erofs::hex(&converted.metadata.digest),
        converted.metadata.image.len(),
        converted.entries,
        converted.metadata.inodes,
        converted.metadata.extra_ids,
        converted.dropped_xattrs,
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
