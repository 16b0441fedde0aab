//! Changes under a path, by inotify, until the builtin is killed.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use wire::message::BuiltinArgs;
use wire::value::Writer;

use super::files::path;
use super::{ready, stdout, tree, Failure, Result};
use crate::kernel::{self, check, own};

/// Directories watched at most; beyond that an overflow is reported, once.
const WATCHES_MAX: usize = 8192;
const EVENT_BUFFER: usize = 64 << 10;
const EVENT_HEADER: usize = size_of::<libc::inotify_event>();
const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_DELETE
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_ATTRIB
    | libc::IN_DELETE_SELF
    | libc::IN_MOVE_SELF;

/// `watch`: a sequence of maps {type, path}. Once it has said that it is ready nothing is missed in
/// directories that exist; what happens in a new one before it is watched too shows as what is found there.
pub fn watch(arguments: &BuiltinArgs) -> Result<()> {
    // SAFETY: makes a descriptor.
    let inotify = own(unsafe { libc::inotify_init1(libc::IN_CLOEXEC) })
        .map_err(|error| Failure::at("watch", &arguments.path, &error))?;
    let mut watcher = Watcher {
        inotify,
        watched: HashMap::new(),
        recursive: arguments.recursive,
        full: false,
    };
    watcher
        .add(path(&arguments.path))
        .map_err(|error| Failure::at("watch", &arguments.path, &error))?;
    if arguments.recursive {
        watcher.descend(path(&arguments.path), false)?;
    }
    ready();
    let mut buffer = vec![0; EVENT_BUFFER];
    while !watcher.watched.is_empty() {
        let count = kernel::read(watcher.inotify.as_raw_fd(), &mut buffer)?;
        watcher.handle(&buffer[..count])?;
    }
    Ok(())
}

fn report(kind: &str, name: &[u8]) -> io::Result<()> {
    stdout().write_all(
        &Writer::new()
            .map(2)
            .text("type")
            .text(kind)
            .text("path")
            .bytes(name)
            .finish(),
    )
}

struct Watcher {
    inotify: OwnedFd,
    /// Watch descriptor to path.
    watched: HashMap<i32, PathBuf>,
    recursive: bool,
    /// The overflow for too many directories was reported.
    full: bool,
}

impl Watcher {
    fn add(&mut self, name: &Path) -> io::Result<()> {
        let c_name = CString::new(name.as_os_str().as_bytes())?;
        let mask = MASK
            | if self.watched.is_empty() {
                0
            } else {
                libc::IN_ONLYDIR | libc::IN_DONT_FOLLOW
            };
        // SAFETY: the path is a C string.
        let watch = check(unsafe {
            libc::inotify_add_watch(self.inotify.as_raw_fd(), c_name.as_ptr(), mask)
        })?;
        self.watched.insert(watch, name.to_owned());
        Ok(())
    }

    /// Watches the directories below `top`. With `announce` what is found there is reported as created: it came before its watch did.
    fn descend(&mut self, top: &Path, announce: bool) -> io::Result<()> {
        let mut open = vec![top.to_owned()];
        while let Some(directory) = open.pop() {
            for entry in tree::entries(&directory).unwrap_or_default() {
                if announce {
                    report("created", entry.as_os_str().as_bytes())?;
                }
                if entry.is_symlink() || !entry.is_dir() {
                    continue;
                }
                if self.watched.len() >= WATCHES_MAX || self.add(&entry).is_err() {
                    self.overflow()?;
                    continue;
                }
                open.push(entry);
            }
        }
        Ok(())
    }

    fn overflow(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.full, true) {
            return Ok(());
        }
        report("overflow", b"")
    }

    fn handle(&mut self, mut events: &[u8]) -> io::Result<()> {
        while events.len() >= EVENT_HEADER {
            // SAFETY: the kernel fills the buffer with whole events; this one's header lies within it.
            let event: libc::inotify_event = unsafe {
                events
                    .as_ptr()
                    .cast::<libc::inotify_event>()
                    .read_unaligned()
            };
            let end = (EVENT_HEADER + event.len as usize).min(events.len());
            let name = &events[EVENT_HEADER..end];
            let name = &name[..name
                .iter()
                .position(|byte| *byte == 0)
                .unwrap_or(name.len())];
            self.handle_one(event.wd, event.mask, name)?;
            events = &events[end..];
        }
        Ok(())
    }

    fn handle_one(&mut self, watch: i32, mask: u32, name: &[u8]) -> io::Result<()> {
        if mask & libc::IN_Q_OVERFLOW != 0 {
            return report("overflow", b"");
        }
        let Some(directory) = self.watched.get(&watch) else {
            return Ok(());
        };
        let full = if name.is_empty() {
            directory.clone()
        } else {
            directory.join(path(name))
        };
        if mask & libc::IN_IGNORED != 0 {
            self.watched.remove(&watch);
            return Ok(());
        }
        let is_top = name.is_empty();
        let kind = match mask {
            _ if mask & libc::IN_CREATE != 0 => "created",
            _ if mask & libc::IN_MODIFY != 0 => "modified",
            _ if mask & libc::IN_DELETE != 0 => "removed",
            _ if mask & libc::IN_MOVED_FROM != 0 => "moved_from",
            _ if mask & libc::IN_MOVED_TO != 0 => "moved_to",
            // A watched directory's own events come from its parent too, if that is watched.
            _ if is_top && self.watched.len() > 1 && !self.is_root(watch) => return Ok(()),
            _ if mask & libc::IN_ATTRIB != 0 => "attributes",
            _ => "removed",
        };
        report(kind, full.as_os_str().as_bytes())?;
        if self.recursive
            && mask & libc::IN_ISDIR != 0
            && mask & (libc::IN_CREATE | libc::IN_MOVED_TO) != 0
        {
            if self.watched.len() >= WATCHES_MAX || self.add(&full).is_err() {
                return self.overflow();
            }
            self.descend(&full, true)?;
        }
        Ok(())
    }

    /// Whether this watch is the path that was asked for: the kernel numbers watches upwards.
    fn is_root(&self, watch: i32) -> bool {
        self.watched.keys().all(|other| watch <= *other)
    }
}
