//! Who a command runs as: names looked up in the sandbox's own passwd and group files.
//!
//! The files are the sandbox's, so they may hold anything; lines that can't be understood are skipped.

use std::borrow::Cow;
use std::fs::{Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::kernel::errno;

/// More than this of a passwd or group file is not read.
const FILE_MAX: u64 = 8 << 20;
/// A file of at most so many bytes is kept: larger ones would cost the sandbox's memory.
const KEPT_MAX: u64 = 256 << 10;
/// The kernel's NGROUPS_MAX.
const GROUPS_MAX: usize = 65_536;

/// A resolved user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// None for a uid without an entry.
    pub name: Option<Vec<u8>>,
    pub home: Vec<u8>,
}

/// Why there is no account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unresolved {
    /// No such user is in the files.
    User,
    /// Likewise.
    Group,
    /// A file is there and can't be read: its errno.
    Unreadable(i32),
}

struct Entry<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

/// The user files in /etc, kept as they were read until they change: on a layer that is loaded on demand a read may have to wait for the store.
pub struct Users {
    passwd: Kept,
    group: Kept,
}

impl Users {
    pub fn new() -> Self {
        Users {
            passwd: Kept::of("/etc/passwd"),
            group: Kept::of("/etc/group"),
        }
    }

    /// The account for `name`, `uid`, `user:group` or `uid:gid`. Empty is root.
    pub fn look_up(&mut self, request: &str) -> Result<Account, Unresolved> {
        resolve(request, &self.passwd.content()?, &self.group.content()?)
    }
}

/// [`Users::look_up`] with the files' contents. A group that is asked for replaces the supplementary ones.
fn resolve(request: &str, passwd: &[u8], group: &[u8]) -> Result<Account, Unresolved> {
    let (user, wanted_group) = match request.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (request, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let mut account = account(user, passwd)?;
    match wanted_group {
        Some(wanted) => account.gid = group_id(wanted, group)?,
        None => account.groups = memberships(&account, group),
    }
    Ok(account)
}

fn account(user: &str, passwd: &[u8]) -> Result<Account, Unresolved> {
    let entries = || passwd.split(|byte| *byte == b'\n').filter_map(entry);
    let number = user.parse::<u32>().ok().filter(|uid| *uid != u32::MAX);
    let found = entries()
        .find(|entry| entry.name == user.as_bytes())
        .or_else(|| entries().find(|entry| Some(entry.uid) == number));
    match (found, number) {
        (Some(entry), _) => {
            let home = if entry.home.is_empty() {
                b"/"
            } else {
                entry.home
            };
            Ok(Account {
                uid: entry.uid,
                gid: entry.gid,
                groups: Vec::new(),
                name: Some(entry.name.to_vec()),
                home: home.to_vec(),
            })
        }
        (None, Some(0)) => Ok(root()),
        (None, Some(uid)) => Ok(Account {
            uid,
            gid: 0,
            groups: Vec::new(),
            name: None,
            home: b"/".to_vec(),
        }),
        (None, None) if user == "root" => Ok(root()),
        (None, None) => Err(Unresolved::User),
    }
}

/// Root exists in every sandbox, whatever its files say.
fn root() -> Account {
    Account {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        name: Some(b"root".to_vec()),
        home: b"/root".to_vec(),
    }
}

fn entry(line: &[u8]) -> Option<Entry<'_>> {
    let mut fields = line.split(|byte| *byte == b':');
    let (name, _password) = (fields.next()?, fields.next()?);
    let (uid, gid) = (number(fields.next()?)?, number(fields.next()?)?);
    let (_comment, home) = (fields.next()?, fields.next()?);
    Some(Entry {
        name,
        uid,
        gid,
        home,
    })
    .filter(|entry| !entry.name.is_empty())
}

/// (name, gid, members) of a line of the group file.
fn group_entry(line: &[u8]) -> Option<(&[u8], u32, &[u8])> {
    let mut fields = line.split(|byte| *byte == b':');
    let (name, _password) = (fields.next()?, fields.next()?);
    Some((
        name,
        number(fields.next()?)?,
        fields.next().unwrap_or_default(),
    ))
}

/// An id; the one that means "leave it" to the kernel is none.
fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field)
        .ok()?
        .parse()
        .ok()
        .filter(|id| *id != u32::MAX)
}

fn group_id(wanted: &str, group: &[u8]) -> Result<u32, Unresolved> {
    let named = group
        .split(|byte| *byte == b'\n')
        .filter_map(group_entry)
        .find(|(name, ..)| *name == wanted.as_bytes());
    named
        .map(|(_, gid, _)| gid)
        .or_else(|| number(wanted.as_bytes()))
        .ok_or(Unresolved::Group)
}

fn memberships(account: &Account, group: &[u8]) -> Vec<u32> {
    let Some(name) = &account.name else {
        return Vec::new();
    };
    let lines = group.split(|byte| *byte == b'\n').filter_map(group_entry);
    lines
        .filter(|(_, _, members)| {
            members
                .split(|byte| *byte == b',')
                .any(|member| member == name)
        })
        .map(|(_, gid, _)| gid)
        .take(GROUPS_MAX)
        .collect()
}

/// What tells one content of a file from the next.
#[derive(PartialEq, Eq)]
struct Version {
    file: (u64, u64),
    size: u64,
    /// Of its content and of its inode, in seconds and nanoseconds.
    changed: [i64; 4],
}

impl Version {
    fn of(found: &Metadata) -> Self {
        Version {
            file: (found.dev(), found.ino()),
            size: found.size(),
            changed: [
                found.mtime(),
                found.mtime_nsec(),
                found.ctime(),
                found.ctime_nsec(),
            ],
        }
    }
}

/// A file's content, as it was last read.
struct Kept {
    path: PathBuf,
    version: Option<Version>,
    content: Vec<u8>,
}

impl Kept {
    fn of(path: impl Into<PathBuf>) -> Self {
        Kept {
            path: path.into(),
            version: None,
            content: Vec::new(),
        }
    }

    /// The file's content, empty where there is no such file or it is something else.
    fn content(&mut self) -> Result<Cow<'_, [u8]>, Unresolved> {
        let version = std::fs::metadata(&self.path).ok().as_ref().map(Version::of);
        if version.is_some() && version == self.version {
            return Ok(Cow::Borrowed(&self.content));
        }
        self.version = None;
        self.content = Vec::new();
        let (version, content) =
            read(&self.path).map_err(|error| Unresolved::Unreadable(errno(&error)))?;
        if version
            .as_ref()
            .is_none_or(|version| version.size > KEPT_MAX)
        {
            return Ok(Cow::Owned(content));
        }
        self.version = version;
        self.content = content;
        Ok(Cow::Borrowed(&self.content))
    }
}

/// A file's content and version; neither where it is absent, closed or no file. O_NONBLOCK: the sandbox may have put a FIFO there.
fn read(path: &Path) -> io::Result<(Option<Version>, Vec<u8>)> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if errno(&error) == libc::EIO => return Err(error),
        Err(_) => return Ok((None, Vec::new())),
    };
    let found = file.metadata()?;
    let mut content = Vec::new();
    if !found.is_file() {
        return Ok((None, content));
    }
    file.take(FILE_MAX).read_to_end(&mut content)?;
    Ok((Some(Version::of(&found)), content))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\nbroken line\nbob:x:1000:100:Bob:/home/bob:/bin/sh\n42:x:7:7::/seven:\n\xff\xfe:x:9:9::/odd:/bin/sh\nminus:x:4294967295:0::/:\n";
    const GROUP: &[u8] = b"root:x:0:\nusers:x:100:\nwheel:x:10:root,bob\naudio:x:29:bob\n";

    fn ids(request: &str) -> Result<(u32, u32, Vec<u32>), Unresolved> {
        resolve(request, PASSWD, GROUP).map(|account| (account.uid, account.gid, account.groups))
    }

    #[test]
    fn names_bring_their_groups_along() {
        assert_eq!(ids("bob"), Ok((1000, 100, vec![10, 29])));
        assert_eq!(ids("1000"), Ok((1000, 100, vec![10, 29])));
        assert_eq!(ids(""), Ok((0, 0, vec![10])));
        assert_eq!(resolve("bob", PASSWD, GROUP).unwrap().home, b"/home/bob");
    }

    #[test]
    fn a_group_that_is_asked_for_replaces_them() {
        assert_eq!(ids("bob:wheel"), Ok((1000, 10, vec![])));
        assert_eq!(ids("1234:5678"), Ok((1234, 5678, vec![])));
        assert_eq!(ids(":audio"), Ok((0, 29, vec![])));
    }

    #[test]
    fn a_name_of_digits_is_a_name_first() {
        assert_eq!(ids("42"), Ok((7, 7, vec![])));
        assert_eq!(ids("43"), Ok((43, 0, vec![])));
    }

    #[test]
    fn what_is_unknown_is_said() {
        assert_eq!(ids("nobody-here"), Err(Unresolved::User));
        assert_eq!(ids("bob:nothing"), Err(Unresolved::Group));
        assert_eq!(ids("minus"), Err(Unresolved::User));
        assert_eq!(ids("4294967295"), Err(Unresolved::User));
        assert_eq!(ids("-1"), Err(Unresolved::User));
    }

    #[test]
    fn root_exists_without_files() {
        assert_eq!(resolve("root", b"", b"").unwrap(), root());
    }

    #[test]
    fn a_file_is_read_again_when_it_has_changed() {
        let path = std::env::temp_dir().join(format!("chronus-users-{}", std::process::id()));
        let mut kept = Kept::of(&path);
        assert_eq!(*kept.content().unwrap(), *b"", "nothing there is no error");
        std::fs::write(&path, PASSWD).unwrap();
        assert_eq!(*kept.content().unwrap(), *PASSWD);
        // As long as it is the same, it isn't looked into.
        kept.content = b"kept".to_vec();
        assert_eq!(*kept.content().unwrap(), *b"kept");
        std::fs::write(&path, GROUP).unwrap();
        assert_eq!(*kept.content().unwrap(), *GROUP);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(*kept.content().unwrap(), *b"");
    }

    #[test]
    fn a_large_file_is_not_kept() {
        let path = std::env::temp_dir().join(format!("chronus-large-{}", std::process::id()));
        let large = vec![b'x'; KEPT_MAX as usize + 1];
        std::fs::write(&path, &large).unwrap();
        let mut kept = Kept::of(&path);
        assert_eq!(*kept.content().unwrap(), *large);
        assert!(kept.content.is_empty());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_that_cant_be_read_is_not_an_absent_one() {
        // Opens, and answers a read at its beginning with EIO.
        let mut kept = Kept::of("/proc/self/mem");
        let error = kept.content().unwrap_err();
        assert_eq!(error, Unresolved::Unreadable(libc::EIO));
    }
}
