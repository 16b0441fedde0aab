//! Writes the metadata of a layer in EROFS format: superblock, device slot, inodes with their xattrs and chunk indexes, directories.
//!
//! Format: Linux, Documentation/filesystems/erofs.rst and fs/erofs/erofs_fs.h, the features of 5.16 only (chunk-based files, device table),
//! so every kernel with file-backed mounts (6.12) takes it. All numbers are little endian; a block is 4 KiB; an inode's number ("nid") is its
//! offset in units of 32 bytes.
//!
//! ```text
//! 0     1024         1152         1280
//! | pad | superblock | device slot | inodes: [64 bytes][xattrs][chunk indexes | tail of a directory | symlink] … | directory blocks … |
//! ```
//!
//! Everything is computed from the tree alone, no clock and no random number, so the same tree gives the same bytes.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use crate::blob::{BLOCK, BLOCK_BITS};
use crate::error::{LayerError, Result};
use crate::extents::{FileData, CHUNK_INDEX};
use crate::limits::EXTRA_IDS_MAX;
use crate::tree::{Attributes, Directory, Leaf, LeafKind, Node};

const SUPERBLOCK: usize = 1024;
const SUPERBLOCK_SIZE: usize = 128;
const DEVICE_SLOT: usize = 1152;
const DEVICE_SLOT_SIZE: usize = 128;
const INODES_START: u64 = 1280;
const SLOT: u64 = 32;
const INODE_SIZE: u64 = 64;
const DIRENT_SIZE: usize = 12;

const MAGIC: u32 = 0xE0F5_E1E2;
const COMPAT_CHECKSUM: u32 = 1;
const COMPAT_MTIME: u32 = 2;
const INCOMPAT_CHUNKED_FILE: u32 = 4;
const INCOMPAT_DEVICE_TABLE: u32 = 8;

const EXTENDED_INODE: u16 = 1;
const LAYOUT_PLAIN: u16 = 0;
const LAYOUT_INLINE: u16 = 2;
const LAYOUT_CHUNKED: u16 = 4;
const CHUNK_FORMAT_INDEXES: u16 = 0x20;
const HOLE: u32 = u32::MAX;
/// The only device slot; 0 is the metadata file itself.
const BLOB_DEVICE: u16 = 1;

/// The mark of a directory that no entry of the sources named: its attributes are made up, and those of a directory below it count (`cover`). Under
/// overlayfs' prefix it is neither shown nor copied up; overlayfs itself knows nothing of it.
pub const UNNAMED: &[u8] = b"trusted.overlay.unnamed";

const XATTR_HEADER: usize = 12;
/// Bytes of xattrs of one inode: their count of 4-byte units is 16 bits.
const XATTRS_MAX: usize = 4 * (u16::MAX as usize - 1);

const S_IFIFO: u16 = 0o010_000;
const S_IFCHR: u16 = 0o020_000;
const S_IFDIR: u16 = 0o040_000;
const S_IFBLK: u16 = 0o060_000;
const S_IFREG: u16 = 0o100_000;
const S_IFLNK: u16 = 0o120_000;
const S_IFSOCK: u16 = 0o140_000;

/// The metadata file and what is worth knowing about it.
pub struct Metadata {
    pub image: Vec<u8>,
    pub digest: [u8; 32],
    /// Inodes, the root and the shared whiteout included.
    pub inodes: u64,
    /// Owner ids above 65,535, ascending.
    pub extra_ids: Vec<u32>,
    /// Directories with the mark `UNNAMED`.
    pub unnamed: usize,
}

/// The data blob that the metadata points to.
pub struct BlobRef {
    pub digest: [u8; 32],
    pub blocks: u32,
}

/// Writes the metadata of `root`.
///
/// # Errors
/// More than `EXTRA_IDS_MAX` owner ids above 65,535; an inode with more xattrs than the format holds; more than `max_bytes` of metadata.
pub fn build(
    root: &Directory,
    leaves: &[Leaf],
    blob: Option<&BlobRef>,
    max_bytes: u64,
) -> Result<Metadata> {
    let mut plan = Plan::new(leaves.len());
    plan.place_tree(root, leaves)?;
    let inodes_end = plan.end;
    let total = plan.finish(max_bytes)?;
    let extra_ids = plan.extra_ids()?;
    let directories = plan.directories.iter();
    let unnamed = directories.filter(|planned| planned.directory.synthesized);
    let unnamed = unnamed.count();
    let mut image = Image {
        bytes: vec![0; total as usize],
        inode_number: 0,
    };
    image.write_tree(&plan, leaves, inodes_end.div_ceil(BLOCK));
    image.write_device_slot(blob, total / BLOCK);
    image.write_superblock(&plan, blob, total / BLOCK);
    let digest = Sha256::digest(&image.bytes).into();
    Ok(Metadata {
        image: image.bytes,
        digest,
        inodes: u64::from(image.inode_number),
        extra_ids,
        unnamed,
    })
}

/// Where an inode stands and how long its parts are.
#[derive(Clone, Copy, Default)]
struct Spot {
    /// Byte offset of the inode.
    at: u64,
    /// Whether the tail of its content (a directory's or a symlink's) follows the inode.
    inline: bool,
    /// First block of the content that doesn't, counted from the end of the inodes.
    block: u64,
}

struct PlannedDirectory<'a> {
    directory: &'a Directory,
    spot: Spot,
    xattrs: Vec<u8>,
    blocks: Vec<DirentBlock<'a>>,
    /// Bytes of the dirents.
    size: u64,
    /// Index of the parent in `Plan::directories`; the root's is its own.
    parent: usize,
    /// Indexes of the subdirectories, in the order of their names.
    subdirectories: Vec<usize>,
}

/// Names that share one block of a directory.
struct DirentBlock<'a> {
    /// What stands under each; None: the directory itself or its parent.
    names: Vec<(&'a [u8], Option<&'a Node>)>,
    size: usize,
}

struct PlannedLeaf {
    spot: Spot,
    links: u32,
}

/// Decides where everything stands, before anything is written: dirents need the numbers of inodes that come later.
struct Plan<'a> {
    end: u64,
    directories: Vec<PlannedDirectory<'a>>,
    leaves: Vec<Option<PlannedLeaf>>,
    /// Leaves in the order of their places.
    leaf_order: Vec<usize>,
    /// All whiteouts are one inode with many names.
    whiteout: Option<PlannedLeaf>,
    content_blocks: u64,
    owners: BTreeSet<u32>,
}

impl<'a> Plan<'a> {
    fn new(leaf_count: usize) -> Self {
        Plan {
            end: INODES_START,
            directories: Vec::new(),
            leaves: (0..leaf_count).map(|_| None).collect(),
            leaf_order: Vec::new(),
            whiteout: None,
            content_blocks: 0,
            owners: BTreeSet::new(),
        }
    }

    /// Depth first, a directory's leaves beside it. The root comes first: its number must fit into 16 bits.
    fn place_tree(&mut self, root: &'a Directory, leaves: &[Leaf]) -> Result<()> {
        let mut pending = vec![(root, 0)];
        while let Some((directory, parent)) = pending.pop() {
            let index = self.place_directory(directory, parent)?;
            if index != 0 {
                self.directories[parent].subdirectories.push(index);
            }
            for node in directory.children.values() {
                match node {
                    Node::Leaf(id) => self.place_leaf(*id, &leaves[*id])?,
                    Node::Whiteout => self.place_whiteout(),
                    Node::Directory(_) => {}
                }
            }
            let subdirectories = directory.children.values().rev();
            pending.extend(subdirectories.filter_map(|node| match node {
                Node::Directory(child) => Some((&**child, index)),
                _ => None,
            }));
        }
        Ok(())
    }

    fn place_directory(&mut self, directory: &'a Directory, parent: usize) -> Result<usize> {
        let xattrs = encode_xattrs(&directory_xattrs(directory))?;
        let blocks = dirent_blocks(directory);
        let last = blocks.last().map_or(0, |block| block.size as u64);
        let size = (blocks.len() as u64 - 1) * BLOCK + last;
        let spot = self.place_content(xattrs.len() as u64, size);
        self.note_owner(&directory.attributes);
        self.directories.push(PlannedDirectory {
            directory,
            spot,
            xattrs,
            blocks,
            size,
            parent,
            subdirectories: Vec::new(),
        });
        Ok(self.directories.len() - 1)
    }

    fn place_leaf(&mut self, id: usize, leaf: &Leaf) -> Result<()> {
        if let Some(known) = &mut self.leaves[id] {
            known.links += 1;
            return Ok(());
        }
        let xattrs = encode_xattrs(&leaf.attributes.xattrs)?.len() as u64;
        let spot = match &leaf.kind {
            LeafKind::Symlink(target) => self.place_content(xattrs, target.len() as u64),
            LeafKind::File(data) if data.size > 0 => self.place_inode(
                (INODE_SIZE + xattrs).next_multiple_of(CHUNK_INDEX) + data.chunks() * CHUNK_INDEX,
            ),
            _ => self.place_inode(INODE_SIZE + xattrs),
        };
        self.note_owner(&leaf.attributes);
        self.leaves[id] = Some(PlannedLeaf { spot, links: 1 });
        self.leaf_order.push(id);
        Ok(())
    }

    fn place_whiteout(&mut self) {
        if let Some(known) = &mut self.whiteout {
            known.links += 1;
            return;
        }
        let spot = self.place_inode(INODE_SIZE);
        self.whiteout = Some(PlannedLeaf { spot, links: 1 });
    }

    fn place_inode(&mut self, length: u64) -> Spot {
        let at = self.end;
        self.end = (at + length).next_multiple_of(SLOT);
        Spot {
            at,
            ..Spot::default()
        }
    }

    /// Places an inode with content in the metadata: whole blocks in the area after the inodes, and the tail after the inode, unless it is
    /// too long to stand there without crossing a block boundary, which the kernel refuses.
    fn place_content(&mut self, xattrs: u64, size: u64) -> Spot {
        let head = INODE_SIZE + xattrs;
        let tail = size % BLOCK;
        let block = self.content_blocks;
        if tail == 0 || head + tail > BLOCK {
            self.content_blocks += size.div_ceil(BLOCK);
            return Spot {
                block,
                ..self.place_inode(head)
            };
        }
        self.content_blocks += size / BLOCK;
        if (self.end + head) % BLOCK + tail > BLOCK {
            self.end = self.end.next_multiple_of(BLOCK);
        }
        Spot {
            inline: true,
            block,
            ..self.place_inode(head + tail)
        }
    }

    /// The length of the whole file in bytes.
    fn finish(&self, max_bytes: u64) -> Result<u64> {
        let total = (self.end.div_ceil(BLOCK) + self.content_blocks) * BLOCK;
        if total > max_bytes {
            return Err(LayerError::input(format!(
                "the metadata takes {total} bytes, at most {max_bytes} are allowed"
            )));
        }
        Ok(total)
    }

    fn note_owner(&mut self, attributes: &Attributes) {
        self.owners.extend(
            [attributes.uid, attributes.gid]
                .into_iter()
                .filter(|id| *id > u32::from(u16::MAX)),
        );
    }

    fn extra_ids(&self) -> Result<Vec<u32>> {
        if self.owners.len() > EXTRA_IDS_MAX {
            return Err(LayerError::input(format!(
                "{} owner ids above 65,535, at most {EXTRA_IDS_MAX} are allowed",
                self.owners.len()
            )));
        }
        Ok(self.owners.iter().copied().collect())
    }
}

/// The kernel searches a directory by halving, first over blocks and then in one, by bytewise order; `.` and `..` stand among the names.
fn dirent_blocks(directory: &Directory) -> Vec<DirentBlock<'_>> {
    let children = directory.children.iter();
    let mut names: Vec<(&[u8], Option<&Node>)> = children
        .map(|(name, node)| (name.as_slice(), Some(node)))
        .collect();
    for dots in [&b"."[..], b".."] {
        let place = names.partition_point(|(name, _)| *name < dots);
        names.insert(place, (dots, None));
    }
    let mut blocks = Vec::new();
    let mut open = DirentBlock {
        names: Vec::new(),
        size: 0,
    };
    for (name, node) in names {
        let size = DIRENT_SIZE + name.len();
        if open.size + size > BLOCK as usize {
            blocks.push(open);
            open = DirentBlock {
                names: Vec::new(),
                size: 0,
            };
        }
        open.names.push((name, node));
        open.size += size;
    }
    blocks.push(open);
    blocks
}

/// The directory's own xattrs and those by which overlayfs merges it.
fn directory_xattrs(directory: &Directory) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut xattrs = directory.attributes.xattrs.clone();
    if directory.opaque {
        xattrs.insert(b"trusted.overlay.opaque".to_vec(), b"y".to_vec());
    }
    if directory.synthesized {
        xattrs.insert(UNNAMED.to_vec(), Vec::new());
    }
    let hides = |node: &Node| matches!(node, Node::Whiteout);
    if directory.children.values().any(hides) {
        // Makes overlayfs look for whiteouts also where no lower layer has the directory; else they would show up in it (Linux b79e05aaa166).
        xattrs.insert(b"trusted.overlay.origin".to_vec(), Vec::new());
    }
    xattrs
}

/// The xattrs as they stand after an inode; nothing when there are none.
fn encode_xattrs(xattrs: &BTreeMap<Vec<u8>, Vec<u8>>) -> Result<Vec<u8>> {
    if xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let mut bytes = vec![0; XATTR_HEADER];
    for (name, value) in xattrs {
        let refuse =
            || LayerError::input(format!("the xattr \"{}\" is too long", name.escape_ascii()));
        let (index, suffix) = split_xattr_name(name)
            .ok_or_else(|| LayerError::input(format!("the xattr \"{}\"", name.escape_ascii())))?;
        let value_size = u16::try_from(value.len()).map_err(|_| refuse())?;
        bytes.push(u8::try_from(suffix.len()).map_err(|_| refuse())?);
        bytes.push(index);
        bytes.extend_from_slice(&value_size.to_le_bytes());
        bytes.extend_from_slice(suffix);
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        if bytes.len() - XATTR_HEADER > XATTRS_MAX {
            return Err(refuse());
        }
    }
    Ok(bytes)
}

/// The format's number for the prefix of a name, and the rest of it, which mustn't be empty.
fn split_xattr_name(name: &[u8]) -> Option<(u8, &[u8])> {
    let prefixes: [(&[u8], u8); 3] = [(b"user.", 1), (b"trusted.", 4), (b"security.", 6)];
    let (prefix, index) = prefixes
        .into_iter()
        .find(|(prefix, _)| name.starts_with(prefix))?;
    let suffix = &name[prefix.len()..];
    (!suffix.is_empty()).then_some((index, suffix))
}

/// What the first 64 bytes of every inode are made from.
struct Inode<'a> {
    layout: u16,
    mode: u16,
    size: u64,
    /// Block address, device number or chunk format, by kind.
    union: u32,
    links: u32,
    attributes: &'a Attributes,
    xattrs: &'a [u8],
}

struct Image {
    bytes: Vec<u8>,
    inode_number: u32,
}

impl Image {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn write_tree(&mut self, plan: &Plan<'_>, leaves: &[Leaf], first_content_block: u64) {
        for index in 0..plan.directories.len() {
            self.write_directory(plan, index, first_content_block);
        }
        for id in &plan.leaf_order {
            if let Some(planned) = &plan.leaves[*id] {
                self.write_leaf(planned, &leaves[*id], first_content_block);
            }
        }
        if let Some(whiteout) = &plan.whiteout {
            let inode = Inode {
                layout: LAYOUT_PLAIN,
                mode: S_IFCHR,
                size: 0,
                union: 0,
                links: whiteout.links,
                attributes: &Attributes::default(),
                xattrs: &[],
            };
            self.write_inode(whiteout.spot.at, &inode);
        }
    }

    fn write_inode(&mut self, at: u64, inode: &Inode<'_>) {
        let at = at as usize;
        self.inode_number += 1;
        let attributes = inode.attributes;
        let xattr_units = match inode.xattrs.len() {
            0 => 0,
            length => 1 + (length - XATTR_HEADER) / 4,
        };
        let format = EXTENDED_INODE | inode.layout << 1;
        self.put(at, &format.to_le_bytes());
        self.put(at + 2, &(xattr_units as u16).to_le_bytes());
        self.put(at + 4, &(inode.mode | attributes.mode).to_le_bytes());
        self.put(at + 8, &inode.size.to_le_bytes());
        self.put(at + 16, &inode.union.to_le_bytes());
        self.put(at + 20, &self.inode_number.to_le_bytes());
        self.put(at + 24, &attributes.uid.to_le_bytes());
        self.put(at + 28, &attributes.gid.to_le_bytes());
        self.put(at + 32, &attributes.mtime.to_le_bytes());
        self.put(at + 40, &attributes.mtime_nsec.to_le_bytes());
        self.put(at + 44, &inode.links.to_le_bytes());
        self.put(at + INODE_SIZE as usize, inode.xattrs);
    }

    /// Writes the content of a directory or symlink where the plan wants it; the last part may be the inline tail.
    fn write_content(
        &mut self,
        spot: Spot,
        xattrs: usize,
        first_content_block: u64,
        parts: &[Vec<u8>],
    ) {
        let block = (first_content_block + spot.block) as usize;
        for (index, part) in parts.iter().enumerate() {
            let at = if spot.inline && index == parts.len() - 1 {
                spot.at as usize + INODE_SIZE as usize + xattrs
            } else {
                (block + index) * BLOCK as usize
            };
            self.put(at, part);
        }
    }

    fn write_directory(&mut self, plan: &Plan<'_>, index: usize, first_content_block: u64) {
        let planned = &plan.directories[index];
        let inode = Inode {
            layout: if planned.spot.inline {
                LAYOUT_INLINE
            } else {
                LAYOUT_PLAIN
            },
            mode: S_IFDIR,
            size: planned.size,
            union: (first_content_block + planned.spot.block) as u32,
            links: 2 + planned.subdirectories.len() as u32,
            attributes: &planned.directory.attributes,
            xattrs: &planned.xattrs,
        };
        self.write_inode(planned.spot.at, &inode);
        let mut subdirectories = planned.subdirectories.iter();
        let parts: Vec<Vec<u8>> = planned
            .blocks
            .iter()
            .map(|block| encode_dirents(plan, index, block, &mut subdirectories))
            .collect();
        self.write_content(
            planned.spot,
            planned.xattrs.len(),
            first_content_block,
            &parts,
        );
    }

    fn write_leaf(&mut self, planned: &PlannedLeaf, leaf: &Leaf, first_content_block: u64) {
        // Encoded without error when it was placed.
        let xattrs = encode_xattrs(&leaf.attributes.xattrs).unwrap_or_default();
        let spot = planned.spot;
        let (layout, mode, size, union) = match &leaf.kind {
            LeafKind::File(data) if data.size > 0 => {
                let format = (data.chunk_bits - BLOCK_BITS) as u16 | CHUNK_FORMAT_INDEXES;
                (LAYOUT_CHUNKED, S_IFREG, data.size, u32::from(format))
            }
            LeafKind::File(_) => (LAYOUT_PLAIN, S_IFREG, 0, 0),
            LeafKind::Symlink(target) => {
                let layout = if spot.inline {
                    LAYOUT_INLINE
                } else {
                    LAYOUT_PLAIN
                };
                let block = (first_content_block + spot.block) as u32;
                (layout, S_IFLNK, target.len() as u64, block)
            }
            LeafKind::CharDevice { major, minor } => {
                (LAYOUT_PLAIN, S_IFCHR, 0, device_number(*major, *minor))
            }
            LeafKind::BlockDevice { major, minor } => {
                (LAYOUT_PLAIN, S_IFBLK, 0, device_number(*major, *minor))
            }
            LeafKind::Fifo => (LAYOUT_PLAIN, S_IFIFO, 0, 0),
            LeafKind::Socket => (LAYOUT_PLAIN, S_IFSOCK, 0, 0),
        };
        let inode = Inode {
            layout,
            mode,
            size,
            union,
            links: planned.links,
            attributes: &leaf.attributes,
            xattrs: &xattrs,
        };
        self.write_inode(spot.at, &inode);
        match &leaf.kind {
            LeafKind::File(data) if data.size > 0 => {
                self.write_chunk_indexes(spot.at + INODE_SIZE + xattrs.len() as u64, data)
            }
            LeafKind::Symlink(target) => {
                self.write_content(
                    spot,
                    xattrs.len(),
                    first_content_block,
                    std::slice::from_ref(target),
                );
            }
            _ => {}
        }
    }

    fn write_chunk_indexes(&mut self, after_xattrs: u64, data: &FileData) {
        let start = after_xattrs.next_multiple_of(CHUNK_INDEX) as usize;
        let at = |chunk: u64| start + (chunk * CHUNK_INDEX) as usize;
        for chunk in 0..data.chunks() {
            self.put(at(chunk) + 4, &HOLE.to_le_bytes());
        }
        let blocks_per_chunk = 1_u64 << (data.chunk_bits - BLOCK_BITS);
        for run in &data.runs {
            for index in 0..run.chunks {
                let block = (u64::from(run.block) + index * blocks_per_chunk) as u32;
                self.put(at(run.first_chunk + index) + 2, &BLOB_DEVICE.to_le_bytes());
                self.put(at(run.first_chunk + index) + 4, &block.to_le_bytes());
            }
        }
    }

    fn write_device_slot(&mut self, blob: Option<&BlobRef>, meta_blocks: u64) {
        let Some(blob) = blob else { return };
        let mut slot = [0; DEVICE_SLOT_SIZE];
        slot[..64].copy_from_slice(hex(&blob.digest).as_bytes());
        slot[64..68].copy_from_slice(&blob.blocks.to_le_bytes());
        // Where the blob's blocks stand when both files are given to a guest as one device, metadata first.
        slot[68..72].copy_from_slice(&(meta_blocks as u32).to_le_bytes());
        self.put(DEVICE_SLOT, &slot);
    }

    /// The superblock comes last: its UUID is a digest of everything else, its checksum covers the rest of its block.
    fn write_superblock(&mut self, plan: &Plan<'_>, blob: Option<&BlobRef>, meta_blocks: u64) {
        let root = plan.directories[0].spot.at / SLOT;
        let devices = u16::from(blob.is_some());
        let incompat = INCOMPAT_CHUNKED_FILE | blob.map_or(0, |_| INCOMPAT_DEVICE_TABLE);
        let mut superblock = [0; SUPERBLOCK_SIZE];
        let mut put =
            |at: usize, bytes: &[u8]| superblock[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_le_bytes());
        put(8, &(COMPAT_CHECKSUM | COMPAT_MTIME).to_le_bytes());
        put(12, &[BLOCK_BITS as u8]);
        put(14, &(root as u16).to_le_bytes());
        put(16, &u64::from(self.inode_number).to_le_bytes());
        put(36, &(meta_blocks as u32).to_le_bytes());
        put(80, &incompat.to_le_bytes());
        put(86, &devices.to_le_bytes());
        put(88, &((DEVICE_SLOT / DEVICE_SLOT_SIZE) as u16).to_le_bytes());
        let uuid = Sha256::digest(&self.bytes);
        put(48, &uuid[..16]);
        self.put(SUPERBLOCK, &superblock);
        let checksum = crc32c(&self.bytes[SUPERBLOCK..BLOCK as usize]);
        self.put(SUPERBLOCK + 4, &checksum.to_le_bytes());
    }
}

/// One block of a directory: fixed-size records (inode number, offset of the name, type), then the names.
fn encode_dirents(
    plan: &Plan<'_>,
    index: usize,
    block: &DirentBlock<'_>,
    subdirectories: &mut std::slice::Iter<'_, usize>,
) -> Vec<u8> {
    let planned = &plan.directories[index];
    let mut records = Vec::with_capacity(block.size);
    let mut names = Vec::new();
    for (name, node) in &block.names {
        let offset = block.names.len() * DIRENT_SIZE + names.len();
        let (at, file_type) = match node {
            None if *name == b"." => (planned.spot.at, 2),
            None => (plan.directories[planned.parent].spot.at, 2),
            Some(Node::Directory(_)) => {
                let child = subdirectories.next().map_or(0, |child| *child);
                (plan.directories[child].spot.at, 2)
            }
            Some(Node::Leaf(id)) => (plan.leaves[*id].as_ref().map_or(0, |leaf| leaf.spot.at), 0),
            Some(Node::Whiteout) => (plan.whiteout.as_ref().map_or(0, |leaf| leaf.spot.at), 3),
        };
        records.extend_from_slice(&(at / SLOT).to_le_bytes());
        records.extend_from_slice(&(offset as u16).to_le_bytes());
        records.extend_from_slice(&[file_type, 0]);
        names.extend_from_slice(name);
    }
    records.extend_from_slice(&names);
    records
}

/// The kernel's `new_encode_dev`: 12 bits of major, 20 of minor, the minor split around it.
fn device_number(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// CRC-32C (Castagnoli, reflected) without the final inversion, as the kernel's `crc32c(~0, …)` gives it.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg())
        })
    })
}

/// Gives changed metadata the UUID and the checksum that fit it, as somebody would who forges a layer.
#[cfg(test)]
pub fn reseal(bytes: &mut [u8]) {
    let mut superblock = [0; SUPERBLOCK_SIZE];
    superblock.copy_from_slice(&bytes[SUPERBLOCK..][..SUPERBLOCK_SIZE]);
    bytes[SUPERBLOCK..][..SUPERBLOCK_SIZE].fill(0);
    let uuid = Sha256::digest(&*bytes);
    superblock[48..64].copy_from_slice(&uuid[..16]);
    superblock[4..8].fill(0);
    bytes[SUPERBLOCK..][..SUPERBLOCK_SIZE].copy_from_slice(&superblock);
    let checksum = crc32c(&bytes[SUPERBLOCK..BLOCK as usize]);
    bytes[SUPERBLOCK + 4..][..4].copy_from_slice(&checksum.to_le_bytes());
}

pub fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnolis() {
        // RFC 3720 B.4: 32 bytes of zeros give 8a9136aa, inverted at the end.
        assert_eq!(!crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn xattrs_are_padded_to_four_bytes() {
        let xattrs = BTreeMap::from([(b"user.a".to_vec(), b"12345".to_vec())]);
        let bytes = encode_xattrs(&xattrs).unwrap();
        assert_eq!(bytes.len(), 12 + 12);
        assert_eq!(&bytes[12..22], b"\x01\x01\x05\x00a12345");
        let long = BTreeMap::from([(b"user.a".to_vec(), vec![0; 65536])]);
        assert!(encode_xattrs(&long).is_err());
    }

    #[test]
    fn dirents_are_sorted_among_the_dots() {
        let mut directory = Directory::default();
        for name in ["a", "+", "...", "B"] {
            directory
                .children
                .insert(name.as_bytes().to_vec(), Node::Whiteout);
        }
        let blocks = dirent_blocks(&directory);
        let names: Vec<&[u8]> = blocks[0].names.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [&b"+"[..], b".", b"..", b"...", b"B", b"a"]);
    }

    #[test]
    fn big_directories_take_several_blocks_that_never_overflow() {
        let mut directory = Directory::default();
        for index in 0..1000 {
            directory
                .children
                .insert(format!("{index:0200}").into_bytes(), Node::Whiteout);
        }
        let blocks = dirent_blocks(&directory);
        assert!(blocks.len() > 50);
        assert!(blocks
            .iter()
            .all(|block| block.size <= BLOCK as usize && !block.names.is_empty()));
    }
}
