//! Sources that are layers of our own making: several adjacent ones become one, with what overlayfs shows of them as its content.
//!
//! Reads back what `erofs` writes: extended inodes, uncompressed content, chunk indexes into one blob. Every offset is checked against the file, so
//! that a damaged one is refused and not followed. Whether there is anything else in the file is for `check` to say.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;

use crate::blob::{copy_blocks, BlobWriter, BLOCK, BLOCK_BITS};
use crate::erofs::{BlobRef, UNNAMED};
use crate::error::{LayerError, Result};
use crate::extents::{FileData, Run, CHUNK_INDEX};
use crate::limits::{FILE_SIZE_MAX, NAME_MAX, PATH_MAX};
use crate::tree::{keep_xattr, Arena, Attributes, Directory, Leaf, LeafId, LeafKind, Node, Xattrs};

const SUPERBLOCK: usize = 1024;
const DEVICE_SLOT: usize = 1152;
/// Characters of a digest in hexadecimal.
const TAG: usize = 64;
const MAGIC: u32 = 0xE0F5_E1E2;
/// Chunked files and a device table; whatever else a file needs isn't ours.
const INCOMPAT_KNOWN: u32 = 4 | 8;
const SLOT: u64 = 32;
const INODE_SIZE: usize = 64;
const DIRENT_SIZE: usize = 12;
const XATTR_HEADER: usize = 12;
const HOLE: u32 = u32::MAX;
const NANOSECONDS: u32 = 1_000_000_000;

pub fn broken(what: &str) -> LayerError {
    LayerError::input(format!("not a layer of ours: {what}"))
}

/// Reads the tree of one metadata file into the arena. Its files' runs are addresses in that layer's own blob.
pub fn read(metadata: &[u8], arena: &mut Arena) -> Result<Directory> {
    let image = Image {
        bytes: metadata,
        arena,
        leaves: BTreeMap::new(),
        directories: BTreeSet::new(),
        read: 0,
        depth: 0,
    };
    image.read()
}

/// The data blob that a metadata file names, if any.
pub fn blob(metadata: &[u8]) -> Result<Option<BlobRef>> {
    if number::<2>(metadata, SUPERBLOCK + 86)? == [0, 0] {
        return Ok(None);
    }
    let tag = part(metadata, DEVICE_SLOT, TAG)?;
    let mut digest = [0; TAG / 2];
    for (byte, pair) in digest.iter_mut().zip(tag.chunks(2)) {
        *byte = std::str::from_utf8(pair)
            .ok()
            .and_then(|pair| u8::from_str_radix(pair, 16).ok())
            .ok_or_else(|| broken("the name of its data is no digest"))?;
    }
    let blocks = u32::from_le_bytes(number(metadata, DEVICE_SLOT + TAG)?);
    Ok(Some(BlobRef { digest, blocks }))
}

fn part(bytes: &[u8], at: usize, length: usize) -> Result<&[u8]> {
    at.checked_add(length)
        .and_then(|end| bytes.get(at..end))
        .ok_or_else(|| broken("it ends too early"))
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    part(bytes, at, N)?
        .try_into()
        .map_err(|_| broken("it ends too early"))
}

/// Moves the data of a layer's live files from its own blob to the end of `to`.
pub fn move_data(
    leaves: &mut [Leaf],
    live: impl Iterator<Item = LeafId>,
    from: &mut File,
    to: &mut BlobWriter,
) -> Result<()> {
    for id in live {
        let LeafKind::File(data) = &mut leaves[id].kind else {
            continue;
        };
        let lengths: Vec<u64> = data.runs.iter().map(|run| data.run_blocks(run)).collect();
        for (run, length) in data.runs.iter_mut().zip(lengths) {
            let block = to.block()?;
            copy_blocks(from, run.block, length, to)?;
            run.block = block;
        }
    }
    Ok(())
}

/// Xattrs of an inode, and what those among them say that are ours.
struct Steering {
    xattrs: Xattrs,
    opaque: bool,
    unnamed: bool,
}

struct Image<'a> {
    bytes: &'a [u8],
    arena: &'a mut Arena,
    /// By inode number, those that have several names: they are one leaf again.
    leaves: BTreeMap<u64, LeafId>,
    /// Those that were read: each has one name.
    directories: BTreeSet<u64>,
    /// Bytes of content, xattrs and chunk indexes so far: each belongs to one inode, so there are no more than the file has.
    read: usize,
    depth: usize,
}

/// The first 64 bytes of an inode, and where its parts are.
struct Inode {
    layout: u16,
    mode: u16,
    size: u64,
    union: u32,
    links: u32,
    attributes: Attributes,
    /// `trusted.overlay.opaque` is among its xattrs.
    opaque: bool,
    /// `UNNAMED` is among its xattrs.
    unnamed: bool,
    /// Behind inode and xattrs.
    end: usize,
}

impl Image<'_> {
    fn read(mut self) -> Result<Directory> {
        if self.u32(SUPERBLOCK)? != MAGIC
            || u32::from(self.part(SUPERBLOCK + 12, 1)?[0]) != BLOCK_BITS
            || self.u32(SUPERBLOCK + 80)? & !INCOMPAT_KNOWN != 0
        {
            return Err(broken("another superblock"));
        }
        let root = u64::from(self.u16(SUPERBLOCK + 14)?);
        let inode = self.inode(root)?;
        if inode.mode & libc::S_IFMT as u16 != libc::S_IFDIR as u16 {
            return Err(broken("the root is no directory"));
        }
        self.directories.insert(root);
        self.directory(inode)
    }

    fn part(&self, at: usize, length: usize) -> Result<&[u8]> {
        part(self.bytes, at, length)
    }

    fn number<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        number(self.bytes, at)
    }

    fn u16(&self, at: usize) -> Result<u16> {
        self.number(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32> {
        self.number(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize) -> Result<u64> {
        self.number(at).map(u64::from_le_bytes)
    }

    fn inode(&mut self, number: u64) -> Result<Inode> {
        let at = number
            .checked_mul(SLOT)
            .and_then(|at| usize::try_from(at).ok())
            .ok_or_else(|| broken("an inode beyond its end"))?;
        let format = self.u16(at)?;
        if format & 1 == 0 {
            return Err(broken("a compact inode"));
        }
        let xattr_units = usize::from(self.u16(at + 2)?);
        let mode = self.u16(at + 4)?;
        let xattr_bytes = match xattr_units {
            0 => 0,
            units => XATTR_HEADER + 4 * (units - 1),
        };
        self.charge(xattr_bytes)?;
        let Steering {
            xattrs,
            opaque,
            unnamed,
        } = self.xattrs(at + INODE_SIZE, xattr_bytes)?;
        let mtime_nsec = self.u32(at + 40)?;
        if mtime_nsec >= NANOSECONDS {
            return Err(broken("a fraction of a second that is none"));
        }
        Ok(Inode {
            layout: format >> 1 & 7,
            mode,
            size: self.u64(at + 8)?,
            union: self.u32(at + 16)?,
            links: self.u32(at + 44)?,
            attributes: Attributes {
                mode: mode & 0o7777,
                uid: self.u32(at + 24)?,
                gid: self.u32(at + 28)?,
                mtime: self.u64(at + 32)? as i64,
                mtime_nsec,
                xattrs,
            },
            opaque,
            unnamed,
            end: at + INODE_SIZE + xattr_bytes,
        })
    }

    /// Notes that so many bytes are read.
    fn charge(&mut self, bytes: usize) -> Result<()> {
        self.read = self.read.saturating_add(bytes);
        if self.read > self.bytes.len() {
            return Err(broken("several files with the same bytes"));
        }
        Ok(())
    }

    fn xattrs(&mut self, at: usize, length: usize) -> Result<Steering> {
        let mut kept = Xattrs::new();
        let (mut opaque, mut unnamed) = (false, false);
        let (mut next, end) = (at + XATTR_HEADER, at + length);
        while length > 0 && next < end {
            let head: [u8; 4] = self.number(next)?;
            let name_length = usize::from(head[0]);
            let value_length = usize::from(u16::from_le_bytes([head[2], head[3]]));
            let suffix = self.part(next + 4, name_length)?;
            let prefix: &[u8] = match head[1] {
                1 => b"user.",
                4 => b"trusted.",
                6 => b"security.",
                _ => return Err(broken("an xattr of an unknown kind")),
            };
            let name = [prefix, suffix].concat();
            let value = self.part(next + 4 + name_length, value_length)?.to_vec();
            next += (4 + name_length + value_length).next_multiple_of(4);
            match name.as_slice() {
                b"trusted.overlay.opaque" => opaque = true,
                UNNAMED => unnamed = true,
                // Made anew where the merged directory needs it.
                b"trusted.overlay.origin" => {}
                name if !keep_xattr(name) => return Err(broken("an xattr that no layer has")),
                _ => {
                    self.arena.charge_meta((name.len() + value.len()) as u64)?;
                    kept.insert(name, value);
                }
            }
        }
        Ok(Steering {
            xattrs: kept,
            opaque,
            unnamed,
        })
    }

    /// Content that stands in the metadata: whole blocks, and for the inline layout a tail behind the inode.
    fn content(&mut self, inode: &Inode) -> Result<Vec<u8>> {
        let size = usize::try_from(inode.size).map_err(|_| broken("content beyond its end"))?;
        self.charge(size)?;
        let tail = match inode.layout {
            0 => 0,
            2 => size % BLOCK as usize,
            _ => return Err(broken("content in an unknown layout")),
        };
        let blocks = self.part(inode.union as usize * BLOCK as usize, size - tail)?;
        Ok([blocks, self.part(inode.end, tail)?].concat())
    }

    fn target(&mut self, inode: &Inode) -> Result<Vec<u8>> {
        let fits = (1..=PATH_MAX as u64).contains(&inode.size);
        let target = if fits {
            self.content(inode)?
        } else {
            Vec::new()
        };
        if !fits || target.contains(&0) {
            return Err(broken("a symbolic link that leads nowhere"));
        }
        Ok(target)
    }

    fn directory(&mut self, inode: Inode) -> Result<Directory> {
        self.depth += 1;
        if self.depth > self.arena.limits.depth + 1 {
            return Err(broken("directories too far below each other"));
        }
        let content = self.content(&inode)?;
        let mut children: Vec<(Vec<u8>, Node)> = Vec::new();
        for block in content.chunks(BLOCK as usize) {
            for (name, number) in dirents(block)? {
                if matches!(name, b"." | b"..") {
                    continue;
                }
                if children.last().is_some_and(|(last, _)| **last >= *name) {
                    return Err(broken("names in another order"));
                }
                self.arena.count_entry()?;
                self.arena.charge_meta(name.len() as u64)?;
                let node = self.node(number)?;
                children.push((name.to_vec(), node));
            }
        }
        // Sorted as they are, they make a tree at once.
        let children = BTreeMap::from_iter(children);
        self.depth -= 1;
        Ok(Directory {
            attributes: inode.attributes,
            synthesized: inode.unnamed,
            opaque: inode.opaque,
            children,
        })
    }

    fn node(&mut self, number: u64) -> Result<Node> {
        if let Some(leaf) = self.leaves.get(&number) {
            return Ok(Node::Leaf(*leaf));
        }
        let inode = self.inode(number)?;
        let kind = match u32::from(inode.mode) & libc::S_IFMT {
            libc::S_IFDIR if !self.directories.insert(number) => {
                return Err(broken("a directory with two names"))
            }
            libc::S_IFDIR => return Ok(Node::Directory(Box::new(self.directory(inode)?))),
            libc::S_IFCHR if inode.union == 0 => return Ok(Node::Whiteout),
            libc::S_IFCHR => {
                let (major, minor) = device(inode.union);
                LeafKind::CharDevice { major, minor }
            }
            libc::S_IFBLK => {
                let (major, minor) = device(inode.union);
                LeafKind::BlockDevice { major, minor }
            }
            libc::S_IFIFO => LeafKind::Fifo,
            libc::S_IFSOCK => LeafKind::Socket,
            libc::S_IFLNK => LeafKind::Symlink(self.target(&inode)?),
            libc::S_IFREG => LeafKind::File(self.file(&inode)?),
            _ => return Err(broken("a file of an unknown type")),
        };
        let leaf = self.arena.add(Leaf {
            attributes: inode.attributes,
            kind,
        });
        if inode.links > 1 {
            self.leaves.insert(number, leaf);
        }
        Ok(Node::Leaf(leaf))
    }

    fn file(&mut self, inode: &Inode) -> Result<FileData> {
        if inode.size == 0 {
            return Ok(FileData::default());
        }
        if inode.layout != 4 || inode.size > FILE_SIZE_MAX {
            return Err(broken("a file in an unknown layout"));
        }
        let mut data = FileData {
            size: inode.size,
            chunk_bits: (inode.union & 0x1f) + BLOCK_BITS,
            runs: Vec::new(),
        };
        let indexes = data.chunks().saturating_mul(CHUNK_INDEX);
        self.arena.charge_meta(indexes)?;
        self.charge(indexes as usize)?;
        let start = (inode.end as u64).next_multiple_of(CHUNK_INDEX) as usize;
        let blocks_per_chunk = 1_u64 << (data.chunk_bits - BLOCK_BITS);
        for chunk in 0..data.chunks() {
            let block = self.u32(start + (chunk * CHUNK_INDEX) as usize + 4)?;
            if block == HOLE {
                continue;
            }
            match data.runs.last_mut() {
                Some(run)
                    if run.first_chunk + run.chunks == chunk
                        && u64::from(run.block) + run.chunks * blocks_per_chunk
                            == u64::from(block) =>
                {
                    run.chunks += 1;
                }
                _ => data.runs.push(Run {
                    first_chunk: chunk,
                    chunks: 1,
                    block,
                }),
            }
        }
        self.arena
            .charge_data(data.blocks().saturating_mul(BLOCK))?;
        Ok(data)
    }
}

/// Names and inode numbers of one block of a directory.
fn dirents(block: &[u8]) -> Result<Vec<(&[u8], u64)>> {
    let wrong = || broken("a directory that can't be read");
    let offset = |index: usize| -> Result<usize> {
        let at = index * DIRENT_SIZE + 8;
        let bytes = block.get(at..at + 2).ok_or_else(wrong)?;
        Ok(usize::from(u16::from_le_bytes([bytes[0], bytes[1]])))
    };
    let names_start = offset(0)?;
    if names_start < DIRENT_SIZE || names_start % DIRENT_SIZE != 0 {
        return Err(wrong());
    }
    let count = names_start / DIRENT_SIZE;
    (0..count)
        .map(|index| {
            let number = block
                .get(index * DIRENT_SIZE..index * DIRENT_SIZE + 8)
                .and_then(|bytes| bytes.try_into().ok())
                .map(u64::from_le_bytes)
                .ok_or_else(wrong)?;
            let end = if index + 1 < count {
                offset(index + 1)?
            } else {
                block.len()
            };
            let name = block.get(offset(index)?..end).ok_or_else(wrong)?;
            // The last name of a block that isn't the last one is followed by zeros.
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            if name.is_empty() || name.len() > NAME_MAX || name.contains(&b'/') {
                return Err(wrong());
            }
            Ok((name, number))
        })
        .collect()
}

/// The inverse of the kernel's `new_encode_dev`: major, minor.
fn device(number: u32) -> (u32, u32) {
    (
        (number & 0xf_ff00) >> 8,
        (number & 0xff) | (number >> 12 & 0xf_ff00),
    )
}
