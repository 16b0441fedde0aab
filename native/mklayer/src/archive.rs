//! Reads tar archives: ustar, GNU (long names, old sparse format, base-256 numbers) and PAX (all sparse versions, xattrs).
//!
//! Formats: POSIX.1-2017 `pax`, the GNU tar manual ("Basic Tar Format", "Storing Sparse Files"), `SCHILY.xattr.*` as star and GNU tar write it.
//! The reader is strict: what it doesn't know it refuses by name, and every length is bounded before memory is taken for it.

use std::collections::BTreeMap;
use std::io::Read;

use crate::error::{LayerError, Result};
use crate::limits::{EXTENSION_MAX, FILE_SIZE_MAX};

const RECORD: usize = 512;
/// Bytes read from the archive at once.
const BUFFER: usize = 1 << 20;

/// A range of a file that has data: offset and length in bytes.
pub type Segment = (u64, u64);

/// What an entry makes.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file. `segments` are its ranges with data, ascending; their lengths sum up to the entry's payload.
    File {
        size: u64,
        segments: Vec<Segment>,
    },
    HardLink(Vec<u8>),
    Symlink(Vec<u8>),
    Directory,
    CharDevice {
        major: u32,
        minor: u32,
    },
    BlockDevice {
        major: u32,
        minor: u32,
    },
    Fifo,
}

/// One entry of an archive, with all extensions applied. Names are as written: not yet normalized.
#[derive(Debug)]
pub struct Entry {
    pub path: Vec<u8>,
    pub kind: Kind,
    /// Permission bits, 0o7777.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    /// Seconds since 1970, rounded down.
    pub mtime: i64,
    pub mtime_nsec: u32,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Iterates over the entries of one archive.
pub struct Archive<R> {
    input: Input<R>,
    /// Attributes that a PAX global header set for all entries after it.
    global: Vec<(Vec<u8>, Vec<u8>)>,
    /// Payload of the current entry that was not read yet, then its padding.
    unread: u64,
    padding: u64,
}

/// What extension headers said about the entry that follows them.
#[derive(Default)]
struct Extensions {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    sparse: Sparse,
}

/// The GNU.sparse.* attributes of PAX.
#[derive(Default)]
struct Sparse {
    /// GNU.sparse.name: the real name, where the header has a made-up one.
    name: Option<Vec<u8>>,
    size: Option<u64>,
    major: Option<u64>,
    minor: Option<u64>,
    /// Offsets and lengths in turn (versions 0.0 and 0.1).
    numbers: Vec<u64>,
    seen: bool,
}

impl<R: Read> Archive<R> {
    pub fn new(input: R) -> Self {
        Archive {
            input: Input::new(input),
            global: Vec::new(),
            unread: 0,
            padding: 0,
        }
    }

    /// The next entry, or None at the archive's end, which must be marked: an archive that just stops is truncated.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        self.skip_payload()?;
        let mut extensions = Extensions::default();
        let mut extended = false;
        loop {
            let Some(header) = self.next_header()? else {
                if extended {
                    return Err(LayerError::input(
                        "the archive ends after an extension header",
                    ));
                }
                return Ok(None);
            };
            match header.typeflag() {
                b'L' => extensions.path = Some(self.long_name(&header)?),
                b'K' => extensions.link = Some(self.long_name(&header)?),
                b'x' => {
                    let body = self.extension(&header)?;
                    for (key, value) in parse_pax(&body)? {
                        extensions.apply(&key, value)?;
                    }
                }
                b'g' => {
                    let body = self.extension(&header)?;
                    self.add_global(parse_pax(&body)?)?;
                    continue;
                }
                b'V' => {
                    self.begin_payload(header.size()?)?;
                    self.skip_payload()?;
                    continue;
                }
                _ => return self.entry(&header, extensions).map(Some),
            }
            extended = true;
        }
    }

    /// Reads `length` bytes of the current entry's payload, piece by piece.
    pub fn read_payload(
        &mut self,
        length: u64,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        debug_assert!(length <= self.unread);
        let mut left = length;
        while left > 0 {
            let part = self
                .input
                .available()?
                .ok_or_else(|| LayerError::input("the archive is truncated inside a file"))?;
            let part = &part[..part.len().min(usize::try_from(left).unwrap_or(usize::MAX))];
            sink(part)?;
            let used = part.len();
            self.input.consume(used);
            left -= used as u64;
            self.unread -= used as u64;
        }
        Ok(())
    }

    /// Reads what follows the end mark: a writer at the other end of a pipe must not fail, and the caller may be hashing the whole stream.
    pub fn drain(&mut self) -> Result<()> {
        while let Some(rest) = self.input.available()? {
            let length = rest.len();
            self.input.consume(length);
        }
        Ok(())
    }

    fn begin_payload(&mut self, size: u64) -> Result<()> {
        self.unread = size;
        self.padding = size.wrapping_neg() % RECORD as u64;
        if size > FILE_SIZE_MAX {
            return Err(LayerError::input(format!("{size} bytes are too many")));
        }
        Ok(())
    }

    fn skip_payload(&mut self) -> Result<()> {
        self.read_payload(self.unread, &mut |_| Ok(()))?;
        self.unread = std::mem::take(&mut self.padding);
        self.read_payload(self.unread, &mut |_| Ok(()))
    }

    /// Reads the whole payload of the current entry into memory.
    fn payload(&mut self, what: &str) -> Result<Vec<u8>> {
        if self.unread > EXTENSION_MAX {
            return Err(LayerError::input(format!(
                "{what} of {} bytes, at most {EXTENSION_MAX} are allowed",
                self.unread
            )));
        }
        let mut body = Vec::with_capacity(self.unread as usize);
        self.read_payload(self.unread, &mut |part| {
            body.extend_from_slice(part);
            Ok(())
        })?;
        self.skip_payload()?;
        Ok(body)
    }

    fn extension(&mut self, header: &Header) -> Result<Vec<u8>> {
        self.begin_payload(header.size()?)?;
        self.payload("an extension header")
    }

    fn long_name(&mut self, header: &Header) -> Result<Vec<u8>> {
        let mut name = self.extension(header)?;
        // GNU tar ends the name with one NUL; a NUL elsewhere stays, and is refused when the name is used.
        if name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    fn add_global(&mut self, attributes: Vec<(Vec<u8>, Vec<u8>)>) -> Result<()> {
        for (key, value) in attributes {
            if matches!(key.as_slice(), b"path" | b"linkpath" | b"size")
                || key.starts_with(b"GNU.sparse.")
            {
                return Err(LayerError::input(format!(
                    "a PAX global header sets \"{}\" for all entries",
                    key.escape_ascii()
                )));
            }
            self.global.retain(|(known, _)| *known != key);
            self.global.push((key, value));
        }
        let bytes: usize = self
            .global
            .iter()
            .map(|(key, value)| key.len() + value.len())
            .sum();
        if bytes as u64 > EXTENSION_MAX {
            return Err(LayerError::input("PAX global headers beyond 1 MiB"));
        }
        Ok(())
    }

    /// The next header record; None at the end mark (two zero records, or one and the end of the stream).
    fn next_header(&mut self) -> Result<Option<Header>> {
        let mut record = [0; RECORD];
        match self.input.fill(&mut record)? {
            RECORD => {}
            0 => {
                return Err(LayerError::input(
                    "the archive is truncated: it has no end mark",
                ))
            }
            _ => {
                return Err(LayerError::input(
                    "the archive is truncated inside a header",
                ))
            }
        }
        if record.iter().any(|byte| *byte != 0) {
            return Header::checked(record).map(Some);
        }
        match self.input.fill(&mut record)? {
            0 => Ok(None),
            RECORD if record.iter().all(|byte| *byte == 0) => Ok(None),
            RECORD => Err(LayerError::input(
                "a single zero record stands between entries",
            )),
            _ => Err(LayerError::input(
                "the archive is truncated inside a header",
            )),
        }
    }

    /// Puts together an entry from its header and extensions, and gets ready for reading its payload.
    fn entry(&mut self, header: &Header, local: Extensions) -> Result<Entry> {
        let mut extensions = Extensions::default();
        for (key, value) in &self.global {
            extensions.apply(key, value.clone())?;
        }
        extensions.override_with(local);
        let path = match (&extensions.sparse.name, &extensions.path) {
            (Some(name), _) | (None, Some(name)) => name.clone(),
            (None, None) => header.path(),
        };
        self.entry_named(header, extensions, path.clone())
            .map_err(|error| error.about(&path))
    }

    fn entry_named(
        &mut self,
        header: &Header,
        extensions: Extensions,
        path: Vec<u8>,
    ) -> Result<Entry> {
        let link = extensions.link.clone().unwrap_or_else(|| header.link());
        let kind = match header.typeflag() {
            // Before POSIX a directory was a file whose name ends in a slash.
            b'0' | 0 if path.ends_with(b"/") => Kind::Directory,
            b'0' | b'7' | 0 => self.file(header, &extensions)?,
            b'S' => self.gnu_sparse_file(header, &extensions)?,
            b'1' => Kind::HardLink(link),
            b'2' => Kind::Symlink(link),
            b'3' => Kind::CharDevice {
                major: header.device_number(329)?,
                minor: header.device_number(337)?,
            },
            b'4' => Kind::BlockDevice {
                major: header.device_number(329)?,
                minor: header.device_number(337)?,
            },
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'D' => {
                // The payload is the list of names for incremental restores.
                self.begin_payload(extensions.size.map_or_else(|| header.size(), Ok)?)?;
                Kind::Directory
            }
            other => {
                return Err(LayerError::input(format!(
                    "entries of type '{}' are not supported",
                    other.escape_ascii()
                )))
            }
        };
        let (mtime, mtime_nsec) = match extensions.mtime {
            Some(time) => time,
            None => (header.number(136, 12, "mtime")?, 0),
        };
        Ok(Entry {
            path,
            kind,
            mode: (header.number(100, 8, "mode")? & 0o7777) as u16,
            uid: extensions
                .uid
                .map_or_else(|| header.owner(108, "uid"), Ok)?,
            gid: extensions
                .gid
                .map_or_else(|| header.owner(116, "gid"), Ok)?,
            mtime,
            mtime_nsec,
            xattrs: extensions.xattrs,
        })
    }

    fn file(&mut self, header: &Header, extensions: &Extensions) -> Result<Kind> {
        let stored = extensions.size.map_or_else(|| header.size(), Ok)?;
        self.begin_payload(stored)?;
        let sparse = &extensions.sparse;
        if !sparse.seen {
            return Ok(Kind::File {
                size: stored,
                segments: if stored > 0 {
                    vec![(0, stored)]
                } else {
                    vec![]
                },
            });
        }
        let size = sparse
            .size
            .ok_or_else(|| LayerError::input("a sparse file without its size"))?;
        let numbers = match (sparse.major, sparse.minor) {
            (Some(1), Some(0)) => self.sparse_map_in_payload()?,
            (None | Some(0), _) => sparse.numbers.clone(),
            _ => return Err(LayerError::input("an unknown version of GNU sparse files")),
        };
        let segments = segments(&numbers, size, self.unread)?;
        Ok(Kind::File { size, segments })
    }

    /// Version 1.0: decimal lines before the data, padded to a record: the number of segments, then offset and length of each.
    fn sparse_map_in_payload(&mut self) -> Result<Vec<u64>> {
        let mut numbers: Vec<u64> = Vec::new();
        let mut digits: Vec<u8> = Vec::new();
        let mut expected = 1;
        let mut read = 0;
        while numbers.len() < expected {
            if self.unread < RECORD as u64 || read > EXTENSION_MAX {
                return Err(LayerError::input(
                    "the map of a sparse file is broken or beyond 1 MiB",
                ));
            }
            let mut record = Vec::with_capacity(RECORD);
            self.read_payload(RECORD as u64, &mut |part| {
                record.extend_from_slice(part);
                Ok(())
            })?;
            read += RECORD as u64;
            for byte in record {
                if numbers.len() == expected {
                    break;
                }
                if byte != b'\n' {
                    digits.push(byte);
                    continue;
                }
                let number = decimal(&digits, "the map of a sparse file")?;
                digits.clear();
                numbers.push(number);
                if numbers.len() == 1 {
                    expected = usize::try_from(number)
                        .ok()
                        .and_then(|count| count.checked_mul(2)?.checked_add(1))
                        .filter(|count| *count as u64 <= EXTENSION_MAX)
                        .ok_or_else(|| LayerError::input("a sparse file of too many segments"))?;
                }
            }
        }
        numbers.remove(0);
        Ok(numbers)
    }

    /// The old GNU format: four segments in the header, more in records that follow it.
    fn gnu_sparse_file(&mut self, header: &Header, extensions: &Extensions) -> Result<Kind> {
        let size = header.length(483, "real size")?;
        let mut numbers = Vec::new();
        header.sparse_numbers(386, 4, &mut numbers)?;
        let mut more = header.0[482] != 0;
        while more {
            let mut record = [0; RECORD];
            if self.input.fill(&mut record)? != RECORD {
                return Err(LayerError::input(
                    "the archive is truncated inside a sparse map",
                ));
            }
            let record = Header(record);
            record.sparse_numbers(0, 21, &mut numbers)?;
            more = record.0[504] != 0;
            if numbers.len() as u64 > EXTENSION_MAX {
                return Err(LayerError::input("a sparse file of too many segments"));
            }
        }
        self.begin_payload(extensions.size.map_or_else(|| header.size(), Ok)?)?;
        let segments = segments(&numbers, size, self.unread)?;
        Ok(Kind::File { size, segments })
    }
}

/// The segments of a sparse file of `size` bytes, of which `stored` are in the archive.
fn segments(numbers: &[u64], size: u64, stored: u64) -> Result<Vec<Segment>> {
    let broken = || LayerError::input("the map of a sparse file contradicts itself");
    if size > FILE_SIZE_MAX {
        return Err(LayerError::input(format!("{size} bytes are too many")));
    }
    if numbers.len() % 2 != 0 {
        return Err(broken());
    }
    let mut segments = Vec::with_capacity(numbers.len() / 2);
    let mut end = 0;
    let mut total: u64 = 0;
    for pair in numbers.chunks_exact(2) {
        let (offset, length) = (pair[0], pair[1]);
        let next = offset.checked_add(length).ok_or_else(broken)?;
        if offset < end || next > size {
            return Err(broken());
        }
        end = next;
        total += length;
        if length > 0 {
            segments.push((offset, length));
        }
    }
    if total != stored {
        return Err(broken());
    }
    Ok(segments)
}

impl Extensions {
    /// Takes over one PAX attribute. Unknown ones are ignored, as POSIX demands.
    fn apply(&mut self, key: &[u8], value: Vec<u8>) -> Result<()> {
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            self.xattrs.insert(decode_xattr_name(name), value);
            return Ok(());
        }
        if let Some(name) = key.strip_prefix(b"GNU.sparse.") {
            return self.sparse.apply(name, value);
        }
        // An empty value takes back what an earlier header said.
        let given = !value.is_empty();
        match key {
            b"path" => self.path = given.then_some(value),
            b"linkpath" => self.link = given.then_some(value),
            b"size" => {
                self.size = given.then(|| decimal(&value, "size")).transpose()?;
            }
            b"uid" => self.uid = given.then(|| owner_decimal(&value, "uid")).transpose()?,
            b"gid" => self.gid = given.then(|| owner_decimal(&value, "gid")).transpose()?,
            b"mtime" => self.mtime = given.then(|| timestamp(&value)).transpose()?,
            _ => {}
        }
        Ok(())
    }

    fn override_with(&mut self, local: Extensions) {
        self.path = local.path.or(self.path.take());
        self.link = local.link.or(self.link.take());
        self.size = local.size.or(self.size);
        self.uid = local.uid.or(self.uid);
        self.gid = local.gid.or(self.gid);
        self.mtime = local.mtime.or(self.mtime);
        self.xattrs.extend(local.xattrs);
        self.sparse = local.sparse;
    }
}

impl Sparse {
    fn apply(&mut self, name: &[u8], value: Vec<u8>) -> Result<()> {
        self.seen = true;
        match name {
            b"name" => self.name = Some(value),
            b"size" | b"realsize" => self.size = Some(decimal(&value, "size")?),
            b"major" => self.major = Some(decimal(&value, "sparse version")?),
            b"minor" => self.minor = Some(decimal(&value, "sparse version")?),
            b"offset" | b"numbytes" => self.numbers.push(decimal(&value, "sparse map")?),
            b"map" => {
                self.numbers = value
                    .split(|byte| *byte == b',')
                    .filter(|number| !number.is_empty())
                    .map(|number| decimal(number, "sparse map"))
                    .collect::<Result<_>>()?;
            }
            b"numblocks" => {}
            other => {
                return Err(LayerError::input(format!(
                    "unknown attribute GNU.sparse.{}",
                    other.escape_ascii()
                )))
            }
        }
        Ok(())
    }
}

/// Splits a PAX header into its records: `<length> <key>=<value>\n`, the length counting all of it.
fn parse_pax(mut body: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let broken = || LayerError::input("a broken PAX header");
    let mut attributes = Vec::new();
    // Some writers fill the header up with NULs.
    while body.first().is_some_and(|byte| *byte != 0) {
        let space = body
            .iter()
            .take(8)
            .position(|byte| *byte == b' ')
            .ok_or_else(broken)?;
        let length = decimal(&body[..space], "PAX length")? as usize;
        let record = body.get(space + 1..length).ok_or_else(broken)?;
        let record = record.strip_suffix(b"\n").ok_or_else(broken)?;
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .ok_or_else(broken)?;
        attributes.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
        body = &body[length..];
    }
    Ok(attributes)
}

/// GNU tar writes `=` and `%` in names of xattrs as `%3D` and `%25`, because the first `=` ends a PAX key.
fn decode_xattr_name(name: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((first, tail)) = rest.split_first() {
        let (byte, used) = match rest.get(..3) {
            Some(b"%3D") => (b'=', 3),
            Some(b"%25") => (b'%', 3),
            _ => (*first, 1),
        };
        decoded.push(byte);
        rest = &tail[used - 1..];
    }
    decoded
}

fn decimal(text: &[u8], what: &str) -> Result<u64> {
    std::str::from_utf8(text)
        .ok()
        .filter(|text| !text.starts_with('+'))
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| {
            let shown = &text[..text.len().min(40)];
            LayerError::input(format!("{what} \"{}\"", shown.escape_ascii()))
        })
}

fn owner_decimal(text: &[u8], what: &str) -> Result<u32> {
    owner_id(
        i64::try_from(decimal(text, what)?).unwrap_or(i64::MAX),
        what,
    )
}

/// Owner ids are 32 bits; the last one means "no id" to the kernel.
fn owner_id(number: i64, what: &str) -> Result<u32> {
    u32::try_from(number)
        .ok()
        .filter(|id| *id != u32::MAX)
        .ok_or_else(|| LayerError::input(format!("{what} {number} is no owner id")))
}

/// `[-]seconds[.fraction]` as seconds rounded down and nanoseconds; digits after the ninth are cut.
fn timestamp(text: &[u8]) -> Result<(i64, u32)> {
    let broken = || {
        LayerError::input(format!(
            "mtime \"{}\"",
            text[..text.len().min(40)].escape_ascii()
        ))
    };
    let (negative, digits) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut parts = digits.splitn(2, |byte| *byte == b'.');
    let whole = parts.next().unwrap_or_default();
    let fraction = parts.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return Err(broken());
    }
    let whole = match whole {
        b"" if !fraction.is_empty() => 0,
        _ => i64::try_from(decimal(whole, "mtime")?).map_err(|_| broken())?,
    };
    let nanoseconds = fraction
        .iter()
        .chain(std::iter::repeat(&b'0'))
        .take(9)
        .fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0'));
    Ok(match (negative, nanoseconds) {
        (false, _) => (whole, nanoseconds),
        (true, 0) => (-whole, 0),
        (true, _) => (-whole - 1, 1_000_000_000 - nanoseconds),
    })
}

/// A header record.
struct Header([u8; RECORD]);

impl Header {
    /// Checks the sum over the header, in which its own field counts as spaces. Old writers added up signed bytes.
    fn checked(record: [u8; RECORD]) -> Result<Header> {
        let header = Header(record);
        let bytes = || {
            (0..RECORD).map(|index| match index {
                148..=155 => b' ',
                _ => record[index],
            })
        };
        let unsigned: i64 = bytes().map(i64::from).sum();
        let signed: i64 = bytes().map(|byte| i64::from(byte as i8)).sum();
        let expected = header.number(148, 8, "checksum").ok();
        if expected != Some(unsigned) && expected != Some(signed) {
            return Err(LayerError::input(
                "this is no tar archive, or a broken one: the checksum of a header is wrong",
            ));
        }
        Ok(header)
    }

    fn typeflag(&self) -> u8 {
        self.0[156]
    }

    fn text(&self, offset: usize, length: usize) -> &[u8] {
        let field = &self.0[offset..offset + length];
        let end = field
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(field.len());
        &field[..end]
    }

    fn path(&self) -> Vec<u8> {
        let name = self.text(0, 100);
        // Only POSIX archives ("ustar\0") have a prefix; GNU ("ustar  ") keeps times and sparse maps there.
        let prefix: &[u8] = if &self.0[257..263] == b"ustar\0" {
            self.text(345, 155)
        } else {
            b""
        };
        if prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, name].join(&b'/')
    }

    fn link(&self) -> Vec<u8> {
        self.text(157, 100).to_vec()
    }

    fn size(&self) -> Result<u64> {
        self.length(124, "size")
    }

    fn length(&self, offset: usize, what: &str) -> Result<u64> {
        let number = self.number(offset, 12, what)?;
        u64::try_from(number).map_err(|_| LayerError::input(format!("{what} {number} is negative")))
    }

    fn owner(&self, offset: usize, what: &str) -> Result<u32> {
        owner_id(self.number(offset, 8, what)?, what)
    }

    fn device_number(&self, offset: usize) -> Result<u32> {
        let number = self.number(offset, 8, "device number")?;
        u32::try_from(number)
            .map_err(|_| LayerError::input(format!("device number {number} is out of range")))
    }

    /// A number field: octal digits between optional spaces and NULs, or base 256 when the first byte has its top bit set.
    fn number(&self, offset: usize, length: usize, what: &str) -> Result<i64> {
        let field = &self.0[offset..offset + length];
        let broken = || LayerError::input(format!("{what} \"{}\"", field.escape_ascii()));
        if field[0] & 0x80 != 0 {
            // Two's complement, big endian; the top bit is only the mark.
            let negative = field[0] & 0x40 != 0;
            let first = if negative { field[0] } else { field[0] & 0x7f };
            let start = if negative { -1 } else { 0 };
            return std::iter::once(first)
                .chain(field[1..].iter().copied())
                .try_fold(start, |sum: i64, byte| {
                    sum.checked_mul(256)?.checked_add(i64::from(byte))
                })
                .ok_or_else(broken);
        }
        let digits = field
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default()
            .trim_ascii();
        digits
            .iter()
            .try_fold(0, |sum: i64, digit| match digit {
                b'0'..=b'7' => sum.checked_mul(8)?.checked_add(i64::from(digit - b'0')),
                _ => None,
            })
            .ok_or_else(broken)
    }

    /// Reads up to `count` pairs of offset and length of the old sparse format; an empty field ends them.
    fn sparse_numbers(&self, offset: usize, count: usize, numbers: &mut Vec<u64>) -> Result<()> {
        for index in 0..count {
            let at = offset + index * 24;
            if self.0[at] == 0 {
                break;
            }
            numbers.push(self.length(at, "sparse offset")?);
            numbers.push(self.length(at + 12, "sparse length")?);
        }
        Ok(())
    }
}

/// A buffered source of bytes that never reads beyond what is asked for by more than its buffer.
struct Input<R> {
    source: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<R: Read> Input<R> {
    fn new(source: R) -> Self {
        Input {
            source,
            buffer: vec![0; BUFFER],
            start: 0,
            end: 0,
        }
    }

    /// The bytes at hand, at least one; None at the end of the stream.
    fn available(&mut self) -> Result<Option<&[u8]>> {
        if self.start == self.end {
            self.start = 0;
            self.end = loop {
                match self.source.read(&mut self.buffer) {
                    Ok(count) => break count,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(source) => {
                        return Err(LayerError::Io {
                            what: "reading the archive".into(),
                            source,
                        })
                    }
                }
            };
        }
        Ok((self.end > self.start).then(|| &self.buffer[self.start..self.end]))
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
    }

    /// Fills `record`; returns fewer bytes than its length only at the end of the stream.
    fn fill(&mut self, record: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < record.len() {
            let Some(part) = self.available()? else { break };
            let count = part.len().min(record.len() - filled);
            record[filled..filled + count].copy_from_slice(&part[..count]);
            self.consume(count);
            filled += count;
        }
        Ok(filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_before_1970_round_down() {
        assert_eq!(timestamp(b"-1.5").unwrap(), (-2, 500_000_000));
        assert_eq!(timestamp(b"-1").unwrap(), (-1, 0));
        assert_eq!(timestamp(b"-0.25").unwrap(), (-1, 750_000_000));
        assert_eq!(timestamp(b"12.0000000019").unwrap(), (12, 1));
        assert!(timestamp(b"").is_err());
        assert!(timestamp(b"1e5").is_err());
        assert!(timestamp(b"-").is_err());
        assert!(timestamp(b"1.-5").is_err());
    }

    #[test]
    fn numbers_are_octal_or_base_256() {
        let mut record = [0; RECORD];
        record[..8].copy_from_slice(b" 0000755");
        assert_eq!(Header(record).number(0, 8, "x").unwrap(), 0o755);
        record[..8].copy_from_slice(&[0x80, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(Header(record).number(0, 8, "x").unwrap(), 65536);
        record[..8].copy_from_slice(&[0xff; 8]);
        assert_eq!(Header(record).number(0, 8, "x").unwrap(), -1);
        record[..8].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]);
        assert_eq!(Header(record).number(0, 8, "x").unwrap(), -2);
        record[..8].copy_from_slice(b"00a00755");
        assert!(Header(record).number(0, 8, "x").is_err());
        let wide = [
            0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        ];
        record[..12].copy_from_slice(&wide);
        assert!(Header(record).number(0, 12, "x").is_err());
    }

    #[test]
    fn pax_records_carry_any_bytes() {
        let parsed = parse_pax(b"12 key=a=\n\0\n5 k=\n").unwrap();
        assert_eq!(parsed[0], (b"key".to_vec(), b"a=\n\0".to_vec()));
        assert_eq!(parsed[1], (b"k".to_vec(), Vec::new()));
        assert!(parse_pax(b"99 key=value\n").is_err());
        assert!(parse_pax(b"0 \n").is_err());
        assert!(parse_pax(b"3 k=v\n").is_err());
        assert!(parse_pax(b"-1 k=v\n").is_err());
    }

    #[test]
    fn sparse_maps_must_add_up() {
        assert_eq!(
            segments(&[0, 5, 10, 5, 20, 0], 20, 10).unwrap(),
            [(0, 5), (10, 5)]
        );
        assert!(segments(&[0, 5, 3, 5], 20, 10).is_err());
        assert!(segments(&[0, 5], 20, 6).is_err());
        assert!(segments(&[u64::MAX, 5], 20, 5).is_err());
        assert!(segments(&[0, 30], 20, 30).is_err());
        assert!(segments(&[0], 20, 0).is_err());
    }
}
