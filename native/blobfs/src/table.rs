//! Chunk tables (`.idx`): where each chunk of a blob lies in its `.z` object, and the digest of its content. `docs/wire.md` has the format.

use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"DSECIDX1";
const HEADER: usize = 24;
const ENTRY: usize = 48;
/// Chunks are powers of two within these bounds: a page at least, and so small that one can be held in memory while it is checked.
const MIN_CHUNK: u32 = 4 << 10;
const MAX_CHUNK: u32 = 16 << 20;
/// 256 GiB at 256 KiB a chunk; a table of 48 MiB. Larger blobs have larger chunks.
const MAX_COUNT: u32 = 1 << 20;

/// How a chunk lies in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Zstd,
    Stored,
    /// Nothing but zero bytes, and not in the store at all.
    Zeros,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Of the frame, in the `.z` object.
    pub offset: u64,
    /// Of the frame.
    pub length: u32,
    pub kind: Kind,
    /// Of the chunk's content.
    pub sha256: [u8; 32],
}

/// A table whose numbers agree with each other.
#[derive(Debug, PartialEq, Eq)]
pub struct Table {
    pub chunk_bytes: u32,
    /// Bytes of the blob.
    pub size: u64,
    pub entries: Vec<Entry>,
}

/// What is wrong with a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invalid(pub &'static str);

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(raw)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}

impl Table {
    /// Reads a whole table.
    pub fn parse(bytes: &[u8]) -> Result<Table, Invalid> {
        if bytes.len() < HEADER || &bytes[..8] != MAGIC {
            return Err(Invalid("it doesn't begin like a chunk table"));
        }
        let (chunk_bytes, count, size) = (u32_at(bytes, 8), u32_at(bytes, 12), u64_at(bytes, 16));
        if !chunk_bytes.is_power_of_two() || !(MIN_CHUNK..=MAX_CHUNK).contains(&chunk_bytes) {
            return Err(Invalid(
                "chunk_bytes is no power of two from 4 KiB to 16 MiB",
            ));
        }
        if size == 0 || count > MAX_COUNT || size.div_ceil(chunk_bytes.into()) != count.into() {
            return Err(Invalid("count and size don't agree, or are out of bounds"));
        }
        if bytes.len() != HEADER + ENTRY * count as usize {
            return Err(Invalid("its length isn't that of its entries"));
        }
        let mut table = Table {
            chunk_bytes,
            size,
            entries: Vec::with_capacity(count as usize),
        };
        let mut zeros = Zeros::default();
        for (index, raw) in bytes[HEADER..].chunks_exact(ENTRY).enumerate() {
            let entry = parse_entry(raw)?;
            let content = table.length_of(index as u32);
            let fits = match entry.kind {
                Kind::Zstd => (1..=longest_frame(content)).contains(&entry.length),
                Kind::Stored => entry.length == content,
                Kind::Zeros => entry.length == 0 && entry.sha256 == zeros.digest(content),
            };
            if !fits || entry.offset.checked_add(entry.length.into()).is_none() {
                return Err(Invalid("an entry's frame can't be that of its chunk"));
            }
            table.entries.push(entry);
        }
        Ok(table)
    }

    pub fn count(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Where a chunk begins in the blob.
    pub fn start_of(&self, chunk: u32) -> u64 {
        u64::from(chunk) * u64::from(self.chunk_bytes)
    }

    /// Bytes of a chunk's content: the last one is shorter.
    pub fn length_of(&self, chunk: u32) -> u32 {
        let left = self.size.saturating_sub(self.start_of(chunk));
        left.min(self.chunk_bytes.into()) as u32
    }

    /// Offset and length of the frames of neighbouring chunks; None if they don't lie one after the other, or are more than one range may be.
    pub fn frames(&self, first: u32, last: u32) -> Option<(u64, u32)> {
        let entries = self.entries.get(first as usize..=last as usize)?;
        let start = entries.first()?.offset;
        let mut end = start;
        for entry in entries {
            if entry.offset != end {
                return None;
            }
            end += u64::from(entry.length);
        }
        Some((start, (end - start).try_into().ok()?))
    }

    /// The chunks that hold `length` bytes (more than 0) from `offset` on, all within the blob.
    pub fn chunks_of(&self, offset: u64, length: u64) -> std::ops::RangeInclusive<u32> {
        let size = u64::from(self.chunk_bytes);
        (offset / size) as u32..=((offset + length - 1) / size) as u32
    }
}

/// The most that zstd makes of so many bytes (its ZSTD_COMPRESSBOUND).
fn longest_frame(content: u32) -> u32 {
    content + content / 256 + 64
}

fn parse_entry(raw: &[u8]) -> Result<Entry, Invalid> {
    let kind = match u32_at(raw, 12) {
        0 => Kind::Zstd,
        1 => Kind::Stored,
        2 => Kind::Zeros,
        _ => return Err(Invalid("an entry has flags that are not known")),
    };
    let mut sha256 = [0; 32];
    sha256.copy_from_slice(&raw[16..]);
    Ok(Entry {
        offset: u64_at(raw, 0),
        length: u32_at(raw, 8),
        kind,
        sha256,
    })
}

/// Digests of zeros, of which a table needs two at most: a whole chunk's and the last one's.
#[derive(Default)]
struct Zeros(Vec<(u32, [u8; 32])>);

impl Zeros {
    fn digest(&mut self, length: u32) -> [u8; 32] {
        if let Some((_, digest)) = self.0.iter().find(|(known, _)| *known == length) {
            return *digest;
        }
        let digest = Sha256::digest(vec![0; length as usize]).into();
        self.0.push((length, digest));
        digest
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A table of `size` bytes in chunks of 4 KiB, all stored as they are, with the digests of zeros.
    pub fn table(size: u64) -> Vec<u8> {
        let count = size.div_ceil(4096) as u32;
        let mut out = MAGIC.to_vec();
        out.extend(4096_u32.to_le_bytes());
        out.extend(count.to_le_bytes());
        out.extend(size.to_le_bytes());
        for chunk in 0..u64::from(count) {
            let length = (size - chunk * 4096).min(4096) as u32;
            out.extend((chunk * 4096).to_le_bytes());
            out.extend(length.to_le_bytes());
            out.extend(1_u32.to_le_bytes());
            out.extend(Sha256::digest(vec![0; length as usize]));
        }
        out
    }

    fn changed(at: usize, bytes: &[u8]) -> Result<Table, Invalid> {
        let mut raw = table(10_000);
        raw[at..at + bytes.len()].copy_from_slice(bytes);
        Table::parse(&raw)
    }

    #[test]
    fn the_last_chunk_is_shorter() {
        let table = Table::parse(&table(10_000)).unwrap();
        assert_eq!((table.count(), table.length_of(1)), (3, 4096));
        assert_eq!(table.length_of(2), 10_000 - 8192);
        assert_eq!(table.chunks_of(4095, 2), 0..=1);
        assert_eq!(table.chunks_of(4096, 4096), 1..=1);
    }

    #[test]
    fn frames_one_after_the_other_are_one_range() {
        let mut table = Table::parse(&table(10_000)).unwrap();
        assert_eq!(table.frames(0, 2), Some((0, 10_000)));
        assert_eq!(table.frames(1, 1), Some((4096, 4096)));
        assert_eq!(table.frames(1, 3), None);
        table.entries[2].offset += 1;
        assert_eq!(table.frames(0, 1), Some((0, 8192)));
        assert_eq!(table.frames(0, 2), None);
        table.entries[0].length = u32::MAX;
        table.entries[1].offset = u64::from(u32::MAX);
        assert_eq!(table.frames(0, 1), None);
    }

    #[test]
    fn zeros_have_no_frame_and_the_digest_of_zeros() {
        assert!(changed(24 + 8, &[0, 0, 0, 0, 2, 0, 0, 0]).is_ok());
        let mut raw = table(10_000);
        raw[24 + 8..24 + 16].copy_from_slice(&[0, 0, 0, 0, 2, 0, 0, 0]);
        raw[24 + 20] ^= 1;
        assert!(Table::parse(&raw).is_err());
    }

    #[test]
    fn hostile_tables_are_refused() {
        assert!(Table::parse(b"").is_err());
        assert!(Table::parse(&table(10_000)[..100]).is_err());
        assert!(Table::parse(&[&table(10_000)[..], b"x"].concat()).is_err());
        assert!(changed(0, b"X").is_err(), "magic");
        for chunk_bytes in [0_u32, 1, 4095, 5000, 32 << 20, u32::MAX] {
            assert!(changed(8, &chunk_bytes.to_le_bytes()).is_err());
        }
        for count in [0_u32, 2, 4, u32::MAX] {
            assert!(changed(12, &count.to_le_bytes()).is_err(), "{count}");
        }
        for size in [0_u64, 8192, u64::MAX, u64::MAX - 4095] {
            assert!(changed(16, &size.to_le_bytes()).is_err(), "{size}");
        }
        assert!(changed(24, &u64::MAX.to_le_bytes()).is_err(), "offset");
        assert!(changed(24 + 8, &4095_u32.to_le_bytes()).is_err(), "stored");
        assert!(changed(24 + 12, &3_u32.to_le_bytes()).is_err(), "flags");
        assert!(changed(24 + 12, &2_u32.to_le_bytes()).is_err(), "zeros");
        let zstd = |length: u32| {
            let bytes = [length.to_le_bytes(), 0_u32.to_le_bytes()].concat();
            changed(24 + 8, &bytes)
        };
        assert!(zstd(4096).is_ok());
        assert!(zstd(0).is_err());
        assert!(zstd(5000).is_err(), "longer than zstd makes anything");
    }
}
