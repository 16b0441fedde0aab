//! Who a command runs as: names looked up in the sandbox's own passwd and group files.
//!
//! The files are the sandbox's, so they may hold anything; lines that can't be understood are skipped.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// More than this of a passwd or group file is not read.
const FILE_MAX: u64 = 8 << 20;
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

/// What of the request isn't there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    User,
    Group,
}

struct Entry<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

/// The account for `name`, `uid`, `user:group` or `uid:gid`, by the files in /etc. Empty is root.
pub fn look_up(request: &str) -> Result<Account, Unknown> {
    resolve(request, &read("/etc/passwd"), &read("/etc/group"))
}

/// [`look_up`] with the files' contents. A group that is asked for replaces the supplementary ones.
fn resolve(request: &str, passwd: &[u8], group: &[u8]) -> Result<Account, Unknown> {
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

fn account(user: &str, passwd: &[u8]) -> Result<Account, Unknown> {
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
        (None, None) => Err(Unknown::User),
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

fn group_id(wanted: &str, group: &[u8]) -> Result<u32, Unknown> {
    let named = group
        .split(|byte| *byte == b'\n')
        .filter_map(group_entry)
        .find(|(name, ..)| *name == wanted.as_bytes());
    named
        .map(|(_, gid, _)| gid)
        .or_else(|| number(wanted.as_bytes()))
        .ok_or(Unknown::Group)
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

/// A file's content, empty where it can't be read. O_NONBLOCK: the sandbox may have put a FIFO there.
fn read(path: &str) -> Vec<u8> {
    let mut content = Vec::new();
    if let Ok(file) = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
    {
        if file.metadata().is_ok_and(|metadata| metadata.is_file())
            && file.take(FILE_MAX).read_to_end(&mut content).is_err()
        {
            content.clear();
        }
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\nbroken line\nbob:x:1000:100:Bob:/home/bob:/bin/sh\n42:x:7:7::/seven:\n\xff\xfe:x:9:9::/odd:/bin/sh\nminus:x:4294967295:0::/:\n";
    const GROUP: &[u8] = b"root:x:0:\nusers:x:100:\nwheel:x:10:root,bob\naudio:x:29:bob\n";

    fn ids(request: &str) -> Result<(u32, u32, Vec<u32>), Unknown> {
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
        assert_eq!(ids("nobody-here"), Err(Unknown::User));
        assert_eq!(ids("bob:nothing"), Err(Unknown::Group));
        assert_eq!(ids("minus"), Err(Unknown::User));
        assert_eq!(ids("4294967295"), Err(Unknown::User));
        assert_eq!(ids("-1"), Err(Unknown::User));
    }

    #[test]
    fn root_exists_without_files() {
        assert_eq!(resolve("root", b"", b"").unwrap(), root());
    }
}
