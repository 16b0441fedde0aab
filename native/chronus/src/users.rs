//! Who a command runs as: names looked up in the sandbox's own passwd and group files.
//!
//! The files are the sandbox's, so they may hold anything; lines that can't be understood are skipped.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::kernel::errno;
use crate::reader::Reader;

/// More than this of a passwd or group file is not read.
const FILE_MAX: u64 = 8 << 20;
/// A file of at most so many bytes is kept: larger ones would cost the sandbox's memory.
const KEPT_MAX: u64 = 256 << 10;
/// A file that is about to be read may grow by so much until it is.
const GROWTH: u64 = 64 << 10;
const PAGE: usize = 4 << 10;
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

/// What a look-up comes to.
pub enum Lookup {
    Known(Result<Account, Unresolved>),
    /// The files are being read: to be asked for again when [`Users::finish`] says so.
    Awaited,
}

/// The user files in /etc, kept as they were read until they change. On a layer that is loaded on demand a read may have to wait for the store: what
/// isn't in memory is read by a child.
pub struct Users {
    passwd: Kept,
    group: Kept,
    reading: Option<Reading>,
    /// They were just read for those who waited: that counts for them, whatever has become of the files since.
    fresh: bool,
}

/// A child at work, and what each of the files will be known by, in the order of their descriptors.
struct Reading {
    reader: Reader,
    files: Vec<(RawFd, Which, Version)>,
}

#[derive(Clone, Copy)]
enum Which {
    Passwd,
    Group,
}

impl Users {
    pub fn new() -> Self {
        Users {
            passwd: Kept::of("/etc/passwd"),
            group: Kept::of("/etc/group"),
            reading: None,
            fresh: false,
        }
    }

    /// The account for `name`, `uid`, `user:group` or `uid:gid`. Empty is root. `cookie` is what starting a child takes.
    pub fn look_up(&mut self, request: &str, cookie: (u64, u64)) -> Lookup {
        if !self.fresh {
            let unread = [
                (Which::Passwd, self.passwd.refresh()),
                (Which::Group, self.group.refresh()),
            ];
            let unread: Vec<_> = unread
                .into_iter()
                .filter_map(|(which, unread)| Some((which, unread?)))
                .collect();
            // Whoever finds a child at work waits for it too, and for the next one if it reads something else.
            if !unread.is_empty()
                && (self.reading.is_some() || self.start_reading(&unread, cookie).is_ok())
            {
                return Lookup::Awaited;
            }
            for (which, unread) in unread {
                // No child can be had: better late than never.
                self.file(which).read(unread);
            }
        }
        let found = self.resolve(request);
        if !self.fresh && self.reading.is_none() {
            self.forget_large();
        }
        Lookup::Known(found)
    }

    fn resolve(&self, request: &str) -> Result<Account, Unresolved> {
        resolve(request, self.passwd.content()?, self.group.content()?)
    }

    fn file(&mut self, which: Which) -> &mut Kept {
        match which {
            Which::Passwd => &mut self.passwd,
            Which::Group => &mut self.group,
        }
    }

    fn start_reading(&mut self, unread: &[(Which, Unread)], cookie: (u64, u64)) -> io::Result<()> {
        let open: Vec<(&File, usize)> = unread
            .iter()
            .map(|(_, unread)| (&unread.file, unread.room()))
            .collect();
        let reader = Reader::start(&open, cookie)?;
        let mut files: Vec<_> = unread
            .iter()
            .map(|(which, unread)| (unread.file.as_raw_fd(), *which, unread.version))
            .collect();
        files.sort_by_key(|(fd, ..)| *fd);
        self.reading = Some(Reading { reader, files });
        Ok(())
    }

    /// A child of that pid is dead. True if it read the files: now look-ups are answered by what it has read, until [`Users::settle`]. Where a file has
    /// become another one meanwhile that has to be fetched as well, they have to wait once more.
    pub fn finish(&mut self, pid: i32) -> bool {
        let Some(reading) = self.reading.take_if(|reading| reading.reader.pid == pid) else {
            return false;
        };
        for ((_, which, version), content) in reading.files.into_iter().zip(reading.reader.finish())
        {
            let file = self.file(which);
            if file.left == Some(version) {
                file.set(Some(version), content);
            }
        }
        self.fresh = self.passwd.left.is_none() && self.group.left.is_none();
        true
    }

    /// All who waited are answered.
    pub fn settle(&mut self) {
        self.fresh = false;
        self.forget_large();
    }

    fn forget_large(&mut self) {
        self.passwd.forget_large();
        self.group.forget_large();
    }
}

/// The account, however long that takes: for children that have nothing else to do.
pub fn look_up_in_place(request: &str) -> Result<Account, Unresolved> {
    let mut users = Users::new();
    for which in [Which::Passwd, Which::Group] {
        users.file(which).read_now();
    }
    users.resolve(request)
}

/// A look-up in the files' contents. A group that is asked for replaces the supplementary ones.
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
#[derive(Clone, Copy, PartialEq, Eq)]
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
    /// None where there is no file to be read.
    version: Option<Version>,
    /// Empty where there is no file to be read; errno where it can't be.
    content: Result<Vec<u8>, i32>,
    /// What was left to a child, and not read since.
    left: Option<Version>,
}

/// A file that is to be read.
struct Unread {
    file: File,
    version: Version,
}

impl Unread {
    /// Bytes that are read of it, with what it may have grown by then. If it is more, the rest comes with the next version.
    fn room(&self) -> usize {
        (self.version.size + GROWTH).min(FILE_MAX) as usize
    }
}

impl Kept {
    fn of(path: impl Into<PathBuf>) -> Self {
        Kept {
            path: path.into(),
            version: None,
            content: Ok(Vec::new()),
            left: None,
        }
    }

    fn content(&self) -> Result<&[u8], Unresolved> {
        self.content
            .as_deref()
            .map_err(|errno| Unresolved::Unreadable(*errno))
    }

    /// Looks whether the file is another than the one that was read, and reads it if that needs no wait. Else it is returned.
    fn refresh(&mut self) -> Option<Unread> {
        let unread = self.look()?;
        if is_in_memory(&unread.file, unread.version.size) {
            self.read(unread);
            return None;
        }
        self.left = Some(unread.version);
        Some(unread)
    }

    fn read_now(&mut self) {
        if let Some(unread) = self.look() {
            self.read(unread);
        }
    }

    /// The file, if it isn't the one that was read.
    fn look(&mut self) -> Option<Unread> {
        let version = std::fs::metadata(&self.path).ok().as_ref().map(Version::of);
        if version.is_some() && version == self.version {
            return None;
        }
        match open(&self.path) {
            Ok(Some(unread)) => Some(unread),
            Ok(None) => {
                self.set(None, Ok(Vec::new()));
                None
            }
            Err(error) => {
                self.set(None, Err(errno(&error)));
                None
            }
        }
    }

    fn read(&mut self, unread: Unread) {
        let mut content = Vec::new();
        let read = unread.file.take(FILE_MAX).read_to_end(&mut content);
        let content = read.map(|_| content).map_err(|error| errno(&error));
        self.set(Some(unread.version), content);
    }

    /// What can't be read is tried again by the next.
    fn set(&mut self, version: Option<Version>, content: Result<Vec<u8>, i32>) {
        self.version = version.filter(|_| content.is_ok());
        self.content = content;
        self.left = None;
    }

    fn forget_large(&mut self) {
        if self.version.is_some_and(|version| version.size > KEPT_MAX) {
            self.set(None, Ok(Vec::new()));
        }
    }
}

/// Opens a file; None where it is absent, closed or no file. O_NONBLOCK: the sandbox may have put a FIFO there.
fn open(path: &Path) -> io::Result<Option<Unread>> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if errno(&error) == libc::EIO => return Err(error),
        Err(_) => return Ok(None),
    };
    let found = file.metadata()?;
    let version = Version::of(&found);
    Ok(found.is_file().then_some(Unread { file, version }))
}

/// Whether reading the file would wait for nothing. What can't be said is taken for no.
fn is_in_memory(file: &File, size: u64) -> bool {
    let Ok(size @ 1..) = usize::try_from(size.min(FILE_MAX)) else {
        return true;
    };
    let mut pages = vec![0_u8; size.div_ceil(PAGE)];
    // SAFETY: a mapping at an address of the kernel's choice, which nobody looks into and which is gone afterwards; a byte a page for mincore, whose lowest
    // bit says whether the page is in memory (mincore(2): it is true for the file's owner, and for CAP_FOWNER over it, which chronus has).
    unsafe {
        let mapped = libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        if mapped == libc::MAP_FAILED {
            return false;
        }
        let told = libc::mincore(mapped, size, pages.as_mut_ptr()) == 0;
        libc::munmap(mapped, size);
        told && pages.iter().all(|page| page & 1 == 1)
    }
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

    fn content(kept: &mut Kept) -> Result<Vec<u8>, Unresolved> {
        kept.read_now();
        kept.content().map(<[u8]>::to_vec)
    }

    fn temporary(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("chronus-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_file_is_read_again_when_it_has_changed() {
        let path = temporary("users");
        let mut kept = Kept::of(&path);
        assert_eq!(
            content(&mut kept).unwrap(),
            b"",
            "nothing there is no error"
        );
        std::fs::write(&path, PASSWD).unwrap();
        assert_eq!(content(&mut kept).unwrap(), PASSWD);
        // As long as it is the same, it isn't looked into.
        kept.content = Ok(b"kept".to_vec());
        assert_eq!(content(&mut kept).unwrap(), b"kept");
        std::fs::write(&path, GROUP).unwrap();
        assert_eq!(content(&mut kept).unwrap(), GROUP);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(content(&mut kept).unwrap(), b"");
    }

    #[test]
    fn a_large_file_is_not_kept() {
        let path = temporary("large");
        let large = vec![b'x'; KEPT_MAX as usize + 1];
        std::fs::write(&path, &large).unwrap();
        let mut kept = Kept::of(&path);
        assert_eq!(content(&mut kept).unwrap(), large);
        kept.forget_large();
        assert_eq!(kept.content.as_deref(), Ok(&b""[..]));
        assert_eq!(content(&mut kept).unwrap(), large);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_that_cant_be_read_is_not_an_absent_one() {
        // Opens, and answers a read at its beginning with EIO.
        let mut kept = Kept::of("/proc/self/mem");
        let error = content(&mut kept).unwrap_err();
        assert_eq!(error, Unresolved::Unreadable(libc::EIO));
    }

    #[test]
    fn what_was_just_written_is_in_memory() {
        let path = temporary("written");
        std::fs::write(&path, PASSWD).unwrap();
        let mut kept = Kept::of(&path);
        assert!(kept.refresh().is_none());
        assert_eq!(kept.content().unwrap(), PASSWD);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_a_child_has_read_counts_for_those_who_waited_until_they_are_answered() {
        let (passwd, group) = (temporary("passwd"), temporary("group"));
        let large = [GROUP, &[b'x'; KEPT_MAX as usize]].concat();
        std::fs::write(&passwd, PASSWD).unwrap();
        std::fs::write(&group, &large).unwrap();
        let mut users = Users {
            passwd: Kept::of(&passwd),
            group: Kept::of(&group),
            ..Users::new()
        };
        let unread = [Which::Passwd, Which::Group].map(|which| {
            let file = users.file(which);
            let unread = file.look().unwrap();
            file.left = Some(unread.version);
            (which, unread)
        });
        users.start_reading(&unread, (0, 0)).unwrap();
        let pid = users
            .reading
            .as_ref()
            .map_or(0, |reading| reading.reader.pid);
        let mut status = 0;
        // SAFETY: waitpid writes one int.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        std::fs::remove_file(&passwd).unwrap();
        std::fs::remove_file(&group).unwrap();
        assert!(!users.finish(pid + 1) && users.finish(pid));
        for _ in 0..2 {
            let Lookup::Known(Ok(account)) = users.look_up("bob", (0, 0)) else {
                panic!("it was read");
            };
            assert_eq!((account.uid, account.groups), (1000, vec![10, 29]));
        }
        users.settle();
        let Lookup::Known(Err(Unresolved::User)) = users.look_up("bob", (0, 0)) else {
            panic!("the files are gone");
        };
    }
}
