//! What a sandbox wrote, listed page by page: a writable layer may have more entries than fit into one answer.

use std::collections::BTreeSet;
use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::sysapi;

/// Directories nested deeper than this are not looked into: each level holds a descriptor.
const MAX_DEPTH: u32 = 128;
/// Bytes that one page may have in an answer: the service takes frames of 4 MiB.
const PAGE_BYTES: usize = 3 << 20;
/// Bytes that an entry takes in an answer besides its path: the keys, the kind, the size and their lengths, in their longest form.
const ENTRY_BYTES: usize = 40;

/// One entry of a sandbox's writable layer.
#[derive(Debug, PartialEq, Eq)]
pub struct Change {
    pub path: Vec<u8>,
    pub kind: &'static str,
    pub size: u64,
}

/// Some entries, in the order of their paths: a directory before what is in it, names by their bytes.
#[derive(Default)]
pub struct Page {
    pub changes: Vec<Change>,
    /// Others follow: the next page begins behind this one's last path.
    pub more: bool,
    entries_left: usize,
    bytes_left: usize,
}

impl Page {
    fn add(&mut self, change: Change) {
        let bytes = change.path.len() + ENTRY_BYTES;
        if self.entries_left == 0 || self.bytes_left < bytes {
            self.more = true;
            return;
        }
        self.entries_left -= 1;
        self.bytes_left -= bytes;
        self.changes.push(change);
    }
}

/// At most `limit` entries of the tree below `top` that come behind the path `after` (empty: from the beginning). The tree changes while it is
/// read and its owner is hostile: no name is followed, and no more is held of a directory than a page may show.
pub fn page(top: &OwnedFd, after: &[u8], limit: usize) -> io::Result<Page> {
    let mut page = Page {
        entries_left: limit,
        bytes_left: PAGE_BYTES,
        ..Page::default()
    };
    let after: Vec<&[u8]> = after
        .split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty())
        .collect();
    list(top, Path::new(""), &after, MAX_DEPTH, &mut page)?;
    Ok(page)
}

fn list(
    dir: &OwnedFd,
    below: &Path,
    after: &[&[u8]],
    depth: u32,
    page: &mut Page,
) -> io::Result<()> {
    let (names, all) = first_names(dir, after.first().copied().unwrap_or_default(), page)?;
    for name in names {
        if page.more {
            return Ok(());
        }
        let Ok(meta) = std::fs::symlink_metadata(path_in(dir).join(&name)) else {
            continue;
        };
        let path = below.join(&name);
        // Told already, unlike what is in it.
        let told = after
            .first()
            .is_some_and(|earlier| *earlier == name.as_bytes());
        if !told {
            page.add(Change {
                path: path.clone().into_os_string().into_vec(),
                kind: kind(&meta),
                size: meta.len(),
            });
        }
        if meta.is_dir() && depth > 0 && !page.more {
            if let Ok(child) = sysapi::open_at(
                dir.as_raw_fd(),
                &CString::new(name.into_vec())?,
                libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW,
            ) {
                let after = if told { &after[1..] } else { &[] };
                list(&child, &path, after, depth - 1, page)?;
            }
        }
    }
    page.more |= !all;
    Ok(())
}

/// The names from `first` on, in order, and whether these are all: there are no more than the page has room for.
fn first_names(dir: &OwnedFd, first: &[u8], page: &Page) -> io::Result<(BTreeSet<OsString>, bool)> {
    let (mut names, mut bytes, mut all) = (BTreeSet::new(), 0, true);
    for entry in std::fs::read_dir(path_in(dir))?.flatten() {
        let name = entry.file_name();
        if name.as_bytes() < first {
            continue;
        }
        bytes += name.len() + ENTRY_BYTES;
        names.insert(name);
        // One more than are shown tells that others follow, and one was shown before.
        while names.len() > page.entries_left.saturating_add(2)
            || bytes > page.bytes_left + 2 * (ENTRY_BYTES + 255)
        {
            if let Some(last) = names.pop_last() {
                bytes -= last.len() + ENTRY_BYTES;
            }
            all = false;
        }
    }
    Ok((names, all))
}

fn kind(meta: &std::fs::Metadata) -> &'static str {
    // overlayfs' mark of a file that was removed: a character device 0/0.
    let removed = meta.mode() & libc::S_IFMT == libc::S_IFCHR && meta.rdev() == 0;
    match (meta.is_dir(), removed) {
        (true, _) => "directory",
        (_, true) => "removed",
        _ => "written",
    }
}

fn path_in(dir: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", dir.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};

    use crate::testing::Directory;

    struct Tree(Directory);

    impl Tree {
        fn new(name: &str) -> Self {
            Tree(Directory::make(&format!("changes-{name}")))
        }

        fn file(&self, path: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }

        fn page(&self, after: &[u8], limit: usize) -> Page {
            page(&File::open(&*self.0).unwrap().into(), after, limit).unwrap()
        }

        /// Every page's paths, one behind the other, and how many pages there are.
        fn pages(&self, limit: usize) -> (Vec<Vec<u8>>, usize) {
            let (mut paths, mut count) = (Vec::new(), 0);
            loop {
                let page = self.page(paths.last().map_or(b"", |path: &Vec<u8>| path), limit);
                paths.extend(page.changes.into_iter().map(|change| change.path));
                count += 1;
                if !page.more {
                    return (paths, count);
                }
            }
        }
    }

    #[test]
    fn pages_of_any_size_make_up_the_whole_tree_once() {
        let tree = Tree::new("whole");
        for path in ["a/b/c", "a/b/d", "a.b", "a/e", "b", "c/d/e/f"] {
            tree.file(path);
        }
        let all = tree.page(b"", 100);
        assert!(!all.more);
        let paths: Vec<Vec<u8>> = all.changes.into_iter().map(|change| change.path).collect();
        let told = |path: &&str| path.as_bytes().to_vec();
        let wanted = [
            "a", "a/b", "a/b/c", "a/b/d", "a/e", "a.b", "b", "c", "c/d", "c/d/e", "c/d/e/f",
        ];
        assert_eq!(paths, wanted.iter().map(told).collect::<Vec<_>>());
        for limit in 1..=paths.len() {
            assert_eq!(
                tree.pages(limit),
                (paths.clone(), paths.len().div_ceil(limit))
            );
        }
    }

    #[test]
    fn a_page_goes_on_behind_a_path_that_is_gone() {
        let tree = Tree::new("gone");
        for path in ["a/b", "c", "d"] {
            tree.file(path);
        }
        let page = tree.page(b"a/x/y", 100);
        let paths: Vec<Vec<u8>> = page.changes.into_iter().map(|change| change.path).collect();
        assert_eq!(paths, [b"c".to_vec(), b"d".to_vec()]);
    }

    #[test]
    fn long_paths_end_a_page_before_its_entries_do() {
        let tree = Tree::new("long");
        let below = [["n".repeat(250).as_str(); 12].join("/"), String::new()].join("/");
        for number in 0..1_500 {
            tree.file(&format!("{below}{number}"));
        }
        let first = tree.page(b"", 100_000);
        assert!(first.more);
        let bytes: usize = first.changes.iter().map(|change| change.path.len()).sum();
        assert!(bytes < PAGE_BYTES && bytes > PAGE_BYTES / 2);
        let (paths, pages) = tree.pages(100_000);
        assert_eq!((paths.len(), pages), (1_512, 2));
    }

    #[test]
    fn of_a_crowded_directory_only_what_a_page_shows_is_held() {
        let tree = Tree::new("crowded");
        for number in 0..100 {
            tree.file(&format!("{number:03}"));
        }
        let page = Page {
            entries_left: 10,
            bytes_left: PAGE_BYTES,
            ..Page::default()
        };
        let dir = File::open(&*tree.0).unwrap().into();
        let (names, all) = first_names(&dir, b"050", &page).unwrap();
        assert_eq!(
            (names.first(), names.len(), all),
            (Some(&OsString::from("050")), 12, false)
        );
    }
}
