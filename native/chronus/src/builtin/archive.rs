//! The tar format: ustar with PAX records, and GNU's long names and large numbers when reading. Only headers: the data is the caller's.
//!
//! POSIX.1-2017, pax interchange format; GNU tar manual, "Basic Tar Format".

use std::io::{self, Read, Write};

pub const BLOCK: usize = 512;
/// The most that extended headers of one entry may take: names and link targets are at most 4 KiB each.
const EXTENDED_MAX: u64 = 1 << 20;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Hardlink,
    Fifo,
    Device,
    /// Sparse files, multi-volume parts and what else isn't understood.
    Other(u8),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub path: Vec<u8>,
    pub kind: Kind,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub size: u64,
    /// Seconds and nanoseconds.
    pub mtime: (i64, u32),
    pub link: Vec<u8>,
}

/// The stream is no tar archive, or ends in the middle of one.
#[derive(Debug)]
pub enum Broken {
    Format(&'static str),
    Io(io::Error),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Broken {
        Broken::Io(error)
    }
}

/// What extended headers say about the next entry.
#[derive(Default)]
struct Overrides {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
}

/// Reads the next entry's headers; None at the end of the archive. The caller reads `size` bytes of data and the padding.
pub fn read_entry(from: &mut impl Read) -> Result<Option<Entry>, Broken> {
    let mut overrides = Overrides::default();
    loop {
        let header = read_block(from)?;
        if header.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        verify_checksum(&header)?;
        let size = number(&header[124..136])?;
        match header[156] {
            b'L' => overrides.path = Some(without_nul(read_extended(from, size)?)),
            b'K' => overrides.link = Some(without_nul(read_extended(from, size)?)),
            b'x' => read_records(&read_extended(from, size)?, &mut overrides)?,
            b'g' => {
                // Global records: comments (git writes the commit there), nothing that an entry needs.
                read_extended(from, size)?;
            }
            flag => return entry(&header, flag, size, overrides).map(Some),
        }
    }
}

fn read_block(from: &mut impl Read) -> Result<[u8; BLOCK], Broken> {
    let mut block = [0; BLOCK];
    match from.read_exact(&mut block) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(Broken::Format("the archive is cut off"))
        }
        Err(error) => Err(Broken::Io(error)),
        Ok(()) => Ok(block),
    }
}

/// Sum of the header's bytes with the checksum itself as blanks.
fn checksum(header: &[u8; BLOCK]) -> u64 {
    header
        .iter()
        .enumerate()
        .map(|(index, byte)| {
            if (148..156).contains(&index) {
                32
            } else {
                u64::from(*byte)
            }
        })
        .sum()
}

fn verify_checksum(header: &[u8; BLOCK]) -> Result<(), Broken> {
    if number(&header[148..156])? == checksum(header) {
        Ok(())
    } else {
        Err(Broken::Format(
            "not a tar archive: a header's checksum is wrong",
        ))
    }
}

/// An octal field, or GNU's base-256 for numbers that don't fit.
fn number(field: &[u8]) -> Result<u64, Broken> {
    if field[0] & 0x80 != 0 {
        let (first, rest) = (u64::from(field[0] & 0x7f), &field[1..]);
        return rest
            .iter()
            .try_fold(first, |sum: u64, byte| {
                sum.checked_mul(256)?.checked_add(u64::from(*byte))
            })
            .ok_or(Broken::Format("a number in a header is out of range"));
    }
    let digits = field
        .iter()
        .copied()
        .skip_while(|byte| *byte == b' ')
        .take_while(|byte| *byte != b' ' && *byte != 0);
    digits
        .map(|byte| {
            if (b'0'..=b'7').contains(&byte) {
                Some(u64::from(byte - b'0'))
            } else {
                None
            }
        })
        .try_fold(0, |sum: u64, digit| sum.checked_mul(8)?.checked_add(digit?))
        .ok_or(Broken::Format("a number in a header is malformed"))
}

fn text(field: &[u8]) -> Vec<u8> {
    field
        .iter()
        .copied()
        .take_while(|byte| *byte != 0)
        .collect()
}

fn without_nul(bytes: Vec<u8>) -> Vec<u8> {
    text(&bytes)
}

fn read_extended(from: &mut impl Read, size: u64) -> Result<Vec<u8>, Broken> {
    if size > EXTENDED_MAX {
        return Err(Broken::Format("an extended header is too large"));
    }
    let mut data = vec![0; (size as usize).next_multiple_of(BLOCK)];
    match from.read_exact(&mut data) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(Broken::Format("the archive is cut off"))
        }
        other => other?,
    }
    data.truncate(size as usize);
    Ok(data)
}

/// PAX records: "length key=value\n", the length counting itself.
fn read_records(mut data: &[u8], overrides: &mut Overrides) -> Result<(), Broken> {
    const MALFORMED: Broken = Broken::Format("a PAX record is malformed");
    while !data.is_empty() {
        let space = data
            .iter()
            .position(|byte| *byte == b' ')
            .ok_or(MALFORMED)?;
        let length: usize = parse(&data[..space]).ok_or(MALFORMED)?;
        if length <= space + 1 || length > data.len() || data[length - 1] != b'\n' {
            return Err(MALFORMED);
        }
        let record = &data[space + 1..length - 1];
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .ok_or(MALFORMED)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        match key {
            b"path" => overrides.path = Some(value.to_vec()),
            b"linkpath" => overrides.link = Some(value.to_vec()),
            b"size" => overrides.size = Some(parse(value).ok_or(MALFORMED)?),
            b"uid" => overrides.uid = Some(parse(value).ok_or(MALFORMED)?),
            b"gid" => overrides.gid = Some(parse(value).ok_or(MALFORMED)?),
            b"mtime" => overrides.mtime = Some(time(value).ok_or(MALFORMED)?),
            _ if key.starts_with(b"GNU.sparse.") => {
                return Err(Broken::Format("sparse entries are not supported"))
            }
            _ => {}
        }
        data = &data[length..];
    }
    Ok(())
}

fn parse<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// A decimal time, possibly negative and with a fraction.
fn time(value: &[u8]) -> Option<(i64, u32)> {
    let value = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = value.split_once('.').unwrap_or((value, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .collect();
    let nanoseconds: u32 = digits.parse().ok()?;
    match (whole.starts_with('-'), nanoseconds) {
        (true, 1..) => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds)),
        _ => Some((seconds, nanoseconds)),
    }
}

fn entry(header: &[u8; BLOCK], flag: u8, size: u64, overrides: Overrides) -> Result<Entry, Broken> {
    let mut path = text(&header[..100]);
    if &header[257..262] == b"ustar" && header[345] != 0 && header[262] == 0 {
        path = [&text(&header[345..500]), b"/".as_slice(), &path].concat();
    }
    let path = overrides.path.unwrap_or(path);
    let kind = match flag {
        // Before POSIX a directory was a file whose name ends in a slash.
        0 | b'0' | b'7' if path.ends_with(b"/") => Kind::Directory,
        0 | b'0' | b'7' => Kind::File,
        b'1' => Kind::Hardlink,
        b'2' => Kind::Symlink,
        b'3' | b'4' => Kind::Device,
        b'5' => Kind::Directory,
        b'6' => Kind::Fifo,
        other => Kind::Other(other),
    };
    let size = if kind == Kind::File || matches!(kind, Kind::Other(_)) {
        overrides.size.unwrap_or(size)
    } else {
        0
    };
    Ok(Entry {
        path,
        kind,
        mode: number(&header[100..108])? as u32 & 0o7777,
        uid: overrides
            .uid
            .map_or_else(|| number(&header[108..116]), Ok)?,
        gid: overrides
            .gid
            .map_or_else(|| number(&header[116..124]), Ok)?,
        size,
        mtime: overrides.mtime.map_or_else(
            || number(&header[136..148]).map(|seconds| (seconds as i64, 0)),
            Ok,
        )?,
        link: overrides.link.unwrap_or_else(|| text(&header[157..257])),
    })
}

/// Bytes between the end of `size` bytes of data and the next header.
pub fn padding(size: u64) -> u64 {
    size.next_multiple_of(BLOCK as u64) - size
}

/// Writes an entry's headers: what doesn't fit into the plain one goes into PAX records before it.
pub fn write_entry(to: &mut impl Write, entry: &Entry) -> io::Result<()> {
    let records = records(entry);
    if !records.is_empty() {
        let name = Entry {
            path: b"PaxHeaders/entry".to_vec(),
            link: Vec::new(),
            size: records.len() as u64,
            mode: 0o644,
            ..entry.clone()
        };
        to.write_all(&header(&name, b'x'))?;
        to.write_all(&records)?;
        to.write_all(&[0; BLOCK][..padding(records.len() as u64) as usize])?;
    }
    let flag = match entry.kind {
        Kind::File => b'0',
        Kind::Hardlink => b'1',
        Kind::Symlink => b'2',
        Kind::Directory => b'5',
        Kind::Fifo => b'6',
        Kind::Device => b'3',
        Kind::Other(flag) => flag,
    };
    to.write_all(&header(entry, flag))
}

/// Two empty blocks.
pub fn write_end(to: &mut impl Write) -> io::Result<()> {
    to.write_all(&[0; 2 * BLOCK])
}

const OCTAL_7: u64 = 0o777_7777;
const OCTAL_11: u64 = 0o777_7777_7777;

fn records(entry: &Entry) -> Vec<u8> {
    let mut out = Vec::new();
    if entry.path.len() > 100 || !entry.path.is_ascii() {
        record(&mut out, "path", &entry.path);
    }
    if entry.link.len() > 100 || !entry.link.is_ascii() {
        record(&mut out, "linkpath", &entry.link);
    }
    for (key, value, limit) in [
        ("size", entry.size, OCTAL_11),
        ("uid", entry.uid, OCTAL_7),
        ("gid", entry.gid, OCTAL_7),
    ] {
        if value > limit {
            record(&mut out, key, value.to_string().as_bytes());
        }
    }
    let (seconds, nanoseconds) = entry.mtime;
    if nanoseconds > 0 && seconds >= 0 {
        record(
            &mut out,
            "mtime",
            format!("{seconds}.{nanoseconds:09}").as_bytes(),
        );
    } else if !(0..=OCTAL_11 as i64).contains(&seconds) {
        record(&mut out, "mtime", seconds.to_string().as_bytes());
    }
    out
}

/// A record's length counts the digits of the length itself.
fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn header(entry: &Entry, flag: u8) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    put(&mut block[..100], &entry.path);
    octal(&mut block[100..108], u64::from(entry.mode));
    octal(&mut block[108..116], entry.uid.min(OCTAL_7));
    octal(&mut block[116..124], entry.gid.min(OCTAL_7));
    octal(&mut block[124..136], entry.size.min(OCTAL_11));
    octal(
        &mut block[136..148],
        u64::try_from(entry.mtime.0).unwrap_or(0).min(OCTAL_11),
    );
    block[156] = flag;
    put(&mut block[157..257], &entry.link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum = checksum(&block);
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn put(field: &mut [u8], value: &[u8]) {
    let length = value.len().min(field.len());
    field[..length].copy_from_slice(&value[..length]);
}

fn octal(field: &mut [u8], value: u64) {
    let digits = format!("{value:0width$o}", width = field.len() - 1);
    put(field, digits.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Entry {
        Entry {
            path: b"a/b".to_vec(),
            kind: Kind::File,
            mode: 0o4755,
            uid: 1,
            gid: 2,
            size: 3,
            mtime: (1_700_000_000, 0),
            link: Vec::new(),
        }
    }

    fn round_trip(entry: &Entry) -> Entry {
        let mut bytes = Vec::new();
        write_entry(&mut bytes, entry).unwrap();
        assert_eq!(bytes.len() % BLOCK, 0);
        read_entry(&mut bytes.as_slice()).unwrap().unwrap()
    }

    #[test]
    fn entries_survive_the_round_trip() {
        let long = vec![b'x'; 5000];
        for entry in [
            example(),
            Entry {
                path: long.clone(),
                ..example()
            },
            Entry {
                path: b"\xff\xfe\n".to_vec(),
                ..example()
            },
            Entry {
                kind: Kind::Symlink,
                size: 0,
                link: long,
                ..example()
            },
            Entry {
                size: 1 << 40,
                uid: 1 << 30,
                gid: 1 << 31,
                ..example()
            },
            Entry {
                mtime: (5, 123_000_000),
                ..example()
            },
            Entry {
                mtime: (-5, 0),
                ..example()
            },
            Entry {
                kind: Kind::Directory,
                size: 0,
                ..example()
            },
        ] {
            assert_eq!(round_trip(&entry), entry);
        }
    }

    #[test]
    fn the_end_is_an_empty_block_and_less_is_an_error() {
        let mut bytes = Vec::new();
        write_end(&mut bytes).unwrap();
        assert!(read_entry(&mut bytes.as_slice()).unwrap().is_none());
        assert!(matches!(
            read_entry(&mut &bytes[..100]),
            Err(Broken::Format(_))
        ));
        assert!(matches!(read_entry(&mut &b""[..]), Err(Broken::Format(_))));
    }

    #[test]
    fn a_damaged_header_is_refused() {
        let mut bytes = Vec::new();
        write_entry(&mut bytes, &example()).unwrap();
        bytes[3] ^= 1;
        assert!(matches!(
            read_entry(&mut bytes.as_slice()),
            Err(Broken::Format(_))
        ));
    }

    #[test]
    fn hostile_records_are_refused_without_a_panic() {
        for data in [
            &b"5"[..],
            b"0 a=b\n",
            b"99 a=b\n",
            b"7 a=b\n",
            b"5 ab\n",
            b"9 size=x\n",
            b"-6 a=b\n",
        ] {
            assert!(
                read_records(data, &mut Overrides::default()).is_err(),
                "{data:?}"
            );
        }
    }

    #[test]
    fn negative_times_have_their_fraction_counted_upwards() {
        assert_eq!(time(b"-1.25"), Some((-2, 750_000_000)));
        assert_eq!(time(b"1.5"), Some((1, 500_000_000)));
        assert_eq!(time(b"1.x"), None);
    }
}
