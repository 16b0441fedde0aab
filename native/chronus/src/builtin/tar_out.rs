//! A directory as a tar stream.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use wire::message::BuiltinArgs;

use super::archive::{self, padding, Entry, Kind, BLOCK};
use super::files::{path, PIPE_SIZE};
use super::{stdout, tree, Failure, Result};
use crate::kernel;

const BUFFER: usize = 256 << 10;

/// `tar_out`: the content of a directory, names relative to it (below `name` if given); of anything else, that one entry. Sockets are left
/// out, as is what vanishes meanwhile.
pub fn tar_out(arguments: &BuiltinArgs) -> Result<()> {
    let top = path(&arguments.path);
    let fail = |error: &io::Error| Failure::at("tar", &arguments.path, error);
    let metadata = fs::metadata(top).map_err(|error| fail(&error))?;
    kernel::enlarge_pipe(stdout().as_raw_fd(), PIPE_SIZE);
    let mut target = stdout();
    let mut packer = Packer {
        out: BufWriter::with_capacity(BUFFER, &mut *target),
        links: HashMap::new(),
    };
    if metadata.is_dir() {
        let prefix = arguments.name.clone().unwrap_or_default();
        packer
            .directory(top, &prefix)
            .map_err(|error| fail(&error))?;
    } else {
        let own_name = top
            .file_name()
            .map_or_else(Vec::new, |name| name.as_bytes().to_vec());
        packer
            .entry(top, &arguments.name.clone().unwrap_or(own_name), &metadata)
            .map_err(|error| fail(&error))?;
    }
    archive::write_end(&mut packer.out)
        .and_then(|()| packer.out.flush())
        .map_err(|error| fail(&error))
}

struct Packer<W: Write> {
    out: W,
    /// First name of a file with several, by device and inode.
    links: HashMap<(u64, u64), Vec<u8>>,
}

impl<W: Write> Packer<W> {
    /// A directory's content, depth first, without recursion: depth is the sandbox's to choose.
    fn directory(&mut self, top: &Path, prefix: &[u8]) -> io::Result<()> {
        let name = |below: &Path| -> Vec<u8> {
            let below = below
                .strip_prefix(top)
                .unwrap_or(below)
                .as_os_str()
                .as_bytes();
            match (prefix, below) {
                (prefix, b"") => prefix.to_vec(),
                (b"", below) => below.to_vec(),
                (prefix, below) => [prefix, b"/", below].concat(),
            }
        };
        let first = tree::entries(top)?;
        if !prefix.is_empty() {
            self.entry(top, prefix, &fs::metadata(top)?)?;
        }
        let mut open: Vec<std::vec::IntoIter<PathBuf>> = vec![first.into_iter()];
        while let Some(siblings) = open.last_mut() {
            let Some(next) = siblings.next() else {
                open.pop();
                continue;
            };
            let Ok(metadata) = fs::symlink_metadata(&next) else {
                continue;
            };
            self.entry(&next, &name(&next), &metadata)?;
            if metadata.is_dir() {
                open.push(tree::entries(&next)?.into_iter());
            }
        }
        Ok(())
    }

    fn entry(&mut self, from: &Path, name: &[u8], metadata: &Metadata) -> io::Result<()> {
        let mut entry = Entry {
            path: name.to_vec(),
            kind: Kind::File,
            mode: metadata.mode() & 0o7777,
            uid: u64::from(metadata.uid()),
            gid: u64::from(metadata.gid()),
            size: 0,
            mtime: (
                metadata.mtime(),
                u32::try_from(metadata.mtime_nsec()).unwrap_or(0),
            ),
            link: Vec::new(),
        };
        let kind = metadata.file_type();
        if kind.is_dir() {
            entry.kind = Kind::Directory;
            entry.path.push(b'/');
        } else if kind.is_symlink() {
            entry.kind = Kind::Symlink;
            entry.link = fs::read_link(from)?.as_os_str().as_bytes().to_vec();
        } else if kind.is_fifo() {
            entry.kind = Kind::Fifo;
        } else if !kind.is_file() {
            // Sockets mean nothing without their server; devices are refused where they would arrive.
            return Ok(());
        } else {
            return self.file(from, entry, metadata);
        }
        archive::write_entry(&mut self.out, &entry)
    }

    fn file(&mut self, from: &Path, mut entry: Entry, metadata: &Metadata) -> io::Result<()> {
        if metadata.nlink() > 1 {
            if let Some(first) = self.links.get(&(metadata.dev(), metadata.ino())) {
                entry.kind = Kind::Hardlink;
                entry.link.clone_from(first);
                return archive::write_entry(&mut self.out, &entry);
            }
            self.links
                .insert((metadata.dev(), metadata.ino()), entry.path.clone());
        }
        let mut file = match OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(from)
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        // The size as it is now; a file that grows is cut there, one that shrinks is filled up.
        entry.size = file.metadata()?.size();
        archive::write_entry(&mut self.out, &entry)?;
        let copied = io::copy(
            &mut (&mut file as &mut File).take(entry.size),
            &mut self.out,
        )?;
        io::copy(&mut io::repeat(0).take(entry.size - copied), &mut self.out)?;
        self.out
            .write_all(&[0; BLOCK][..padding(entry.size) as usize])
    }
}
