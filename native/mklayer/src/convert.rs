//! From sources to a layer: reads archives, a directory or layers in order, keeps the tree, writes the data, and puts the metadata on top.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;

use crate::archive::{Archive, Entry, Kind, Segment};
use crate::blob::{BlobWriter, BLOCK};
use crate::directory::{self, Removed};
use crate::erofs::{self, BlobRef, Metadata};
use crate::error::{LayerError, Result};
use crate::extents::{FileWriter, CHUNK_INDEX};
use crate::globs::Globs;
use crate::image;
use crate::limits::Limits;
use crate::tree::{
    components, cover, hidden_link, inherit, keep_xattr, merge, raise, Arena, Attributes,
    Directory, LayerBuilder, Leaf, LeafId, LeafKind, Node, Place, Target,
};

/// A layer's blob is rewritten when more than one in this many of its blocks belongs to no file any more.
const DEAD_FRACTION: u64 = 20;
/// Largest device numbers that fit into an inode.
const MAJOR_MAX: u32 = (1 << 12) - 1;
const MINOR_MAX: u32 = (1 << 20) - 1;

pub struct Converter {
    arena: Arena,
    /// Components under which all names are placed.
    at: Vec<Vec<u8>>,
    blob: BlobWriter,
    tree: Option<Directory>,
    ground: Ground,
    entries: u64,
    dropped_xattrs: u64,
    /// Layers that were read: the first of each one's leaves, and its blob, where their data still lies.
    layers: Vec<(LeafId, Option<File>)>,
}

/// The layers that lie below the one that is made. Nothing of them goes into it but what its archives have hard links to.
#[derive(Default)]
struct Ground {
    tree: Option<Directory>,
    /// The first of each one's leaves, and its blob.
    layers: Vec<(LeafId, Option<File>)>,
    /// Behind the last leaf of theirs.
    end: LeafId,
    /// Files of theirs that have got a name in this layer, and what stands for them here.
    raised: BTreeMap<LeafId, LeafId>,
}

pub struct Converted {
    pub metadata: Metadata,
    /// None: no file has data, and no blob is needed.
    pub blob: Option<BlobRef>,
    pub blob_file: File,
    /// `blob_file` is the spare file, not the first one.
    pub compacted: bool,
    pub entries: u64,
    pub dropped_xattrs: u64,
}

impl Converter {
    /// `at` is an absolute path; `blob` an empty file, open for reading and writing.
    pub fn new(limits: Limits, at: &[u8], blob: File) -> Result<Self> {
        if !at.starts_with(b"/") {
            return Err(LayerError::Usage("--at must be an absolute path".into()));
        }
        Ok(Converter {
            at: components(at, &limits)?,
            arena: Arena::new(limits),
            blob: BlobWriter::new(blob),
            tree: None,
            ground: Ground::default(),
            entries: 0,
            dropped_xattrs: 0,
            layers: Vec::new(),
        })
    }

    /// Says that a layer made earlier lies below what is made: on top of the earlier ones of its kind, and before any archive is added.
    pub fn add_ground(&mut self, metadata: &[u8], blob: Option<File>) -> Result<()> {
        self.ground.layers.push((self.arena.leaves.len(), blob));
        let upper = image::read(metadata, &mut self.arena)?;
        self.arena.uncount();
        self.ground.end = self.arena.leaves.len();
        self.ground.tree = Some(match self.ground.tree.take() {
            Some(lower) => merge(lower, upper),
            None => upper,
        });
        Ok(())
    }

    /// Reads one archive and puts what it holds on top of the earlier ones.
    pub fn add_layer(&mut self, source: impl Read) -> Result<()> {
        let ground = self.ground.tree.take();
        let added = self.add_archive(source, ground.as_ref());
        self.ground.tree = ground;
        added
    }

    fn add_archive(&mut self, source: impl Read, ground: Option<&Directory>) -> Result<()> {
        let below = self.tree.take();
        let mut archive = Archive::new(source);
        let mut builder = LayerBuilder::new(below.as_ref().into_iter().chain(ground));
        if !self.at.is_empty() {
            // The place exists even if nothing is put into it.
            let place = format!("/{}", String::from_utf8_lossy(&self.at.join(&b'/')));
            if let Target::File(place) = builder.target(self.at.clone(), &self.arena)? {
                builder.make_directory(&place, &mut self.arena)?;
            } else {
                return Err(LayerError::Usage(format!(
                    "--at {place} is the name of a whiteout"
                )));
            }
        }
        while let Some(entry) = archive.next_entry()? {
            self.entries += 1;
            self.arena.count_entry()?;
            let path = entry.path.clone();
            self.add_entry(&mut archive, &mut builder, entry)
                .map_err(|error| error.about(&path))?;
        }
        archive.drain()?;
        let upper = builder.finish();
        self.tree = Some(match below {
            Some(lower) => merge(lower, upper),
            None => upper,
        });
        Ok(())
    }

    /// Takes a directory as the whole layer, but for what `globs` match. Returns what each of them kept out.
    pub fn add_directory(&mut self, top: OwnedFd, globs: &Globs) -> Result<Vec<Removed>> {
        let found = directory::read(top, globs, &mut self.arena, &mut self.blob)?;
        self.entries += found.entries;
        self.dropped_xattrs += found.dropped_xattrs;
        self.tree = Some(found.root);
        Ok(found.removed)
    }

    /// Puts a layer made earlier on top of the earlier sources. `blob` is read when the layer is finished.
    pub fn add_image(&mut self, metadata: &[u8], blob: Option<File>) -> Result<()> {
        self.layers.push((self.arena.leaves.len(), blob));
        let before = self.arena.entries();
        let upper = image::read(metadata, &mut self.arena)?;
        self.entries += self.arena.entries() - before;
        self.tree = Some(match self.tree.take() {
            Some(lower) => merge(lower, upper),
            None => upper,
        });
        Ok(())
    }

    /// Takes what overlayfs lacks to show a stack of layers made earlier (lowest first) as one: directories alone.
    pub fn cover(&mut self, stack: &[Vec<u8>]) -> Result<()> {
        let mut trees = Vec::with_capacity(stack.len());
        for metadata in stack {
            trees.push(image::read(metadata, &mut self.arena)?);
            self.arena.uncount();
        }
        let stack: Vec<&Directory> = trees.iter().rev().collect();
        if let Some((path, target)) = hidden_link(&stack, &self.arena) {
            let target = String::from_utf8_lossy(&target);
            return Err(LayerError::entry(
                &path,
                format!("the layers below have a link to {target:?} in its place: import what lies in it at the link's target"),
            ));
        }
        self.tree = cover(&stack);
        self.entries = self.tree.as_ref().map_or(0, count_directories);
        Ok(())
    }

    /// Copies what is still to be seen of the layers' files to the new blob.
    fn gather(&mut self, root: &Directory) -> Result<()> {
        let live = live_leaves(root, self.arena.leaves.len());
        let mut ends: Vec<LeafId> = self.layers.iter().skip(1).map(|layer| layer.0).collect();
        ends.push(self.arena.leaves.len());
        for ((start, file), end) in std::mem::take(&mut self.layers).into_iter().zip(ends) {
            let Some(mut file) = file else { continue };
            let own = live.iter().copied().filter(|id| (start..end).contains(id));
            image::move_data(&mut self.arena.leaves, own, &mut file, &mut self.blob)?;
        }
        Ok(())
    }

    fn add_entry<R: Read>(
        &mut self,
        archive: &mut Archive<R>,
        builder: &mut LayerBuilder<'_>,
        entry: Entry,
    ) -> Result<()> {
        let path = self.path(&entry.path)?;
        let place = match builder.target(path, &self.arena)? {
            Target::File(place) => place,
            Target::Whiteout(place) => return builder.put_whiteout(&place, &mut self.arena),
            Target::Opaque(place) => return builder.put_opaque(&place, &mut self.arena),
            Target::Ignored => return Ok(()),
        };
        let attributes = self.attributes(&entry)?;
        match entry.kind {
            Kind::Directory => builder.put_directory(&place, attributes, &mut self.arena),
            Kind::HardLink(target) => {
                let found = builder.link_target(self.path(&target)?, &self.arena)?;
                let leaf = match found < self.ground.end {
                    true => self.raised(found)?,
                    false => found,
                };
                // Unpacking sets what the entry says of the file, as docker and containerd do, whatever its first name said.
                self.arena.leaves[leaf].adopt(attributes);
                builder.put_leaf(&place, leaf, &mut self.arena)
            }
            // The kernel reads this device as a whiteout, so that is what it is.
            Kind::CharDevice { major: 0, minor: 0 } => {
                builder.put_whiteout(&place, &mut self.arena)
            }
            Kind::File { size, segments } => {
                let data = self.copy_file(archive, size, &segments)?;
                self.put(builder, &place, attributes, data)
            }
            Kind::Symlink(target) => {
                let kind = self.symlink(target)?;
                self.put(builder, &place, attributes, kind)
            }
            Kind::CharDevice { major, minor } => {
                check_device(major, minor)?;
                self.put(
                    builder,
                    &place,
                    attributes,
                    LeafKind::CharDevice { major, minor },
                )
            }
            Kind::BlockDevice { major, minor } => {
                check_device(major, minor)?;
                self.put(
                    builder,
                    &place,
                    attributes,
                    LeafKind::BlockDevice { major, minor },
                )
            }
            Kind::Fifo => self.put(builder, &place, attributes, LeafKind::Fifo),
        }
    }

    /// The file of this layer that takes the place of one of the layers below, which has got a name here.
    fn raised(&mut self, below: LeafId) -> Result<LeafId> {
        if let Some(leaf) = self.ground.raised.get(&below) {
            return Ok(*leaf);
        }
        let leaf = self.arena.leaves[below].clone();
        if let LeafKind::File(data) = &leaf.kind {
            let indexes = data.chunks().saturating_mul(CHUNK_INDEX);
            self.arena.charge_meta(indexes)?;
            let bytes = data.blocks().saturating_mul(BLOCK);
            self.arena.charge_data(bytes)?;
        }
        let leaf = self.arena.add(leaf);
        let layers = &mut self.ground.layers;
        let source = layers.iter_mut().rfind(|(start, _)| *start <= below);
        if let Some((_, Some(file))) = source {
            let only = std::iter::once(leaf);
            image::move_data(&mut self.arena.leaves, only, file, &mut self.blob)?;
        }
        self.ground.raised.insert(below, leaf);
        Ok(leaf)
    }

    fn path(&self, name: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut path = self.at.clone();
        path.extend(components(name, &self.arena.limits)?);
        Ok(path)
    }

    fn put(
        &mut self,
        builder: &mut LayerBuilder<'_>,
        place: &Place,
        attributes: Attributes,
        kind: LeafKind,
    ) -> Result<()> {
        let leaf = self.arena.add(Leaf { attributes, kind });
        builder.put_leaf(place, leaf, &mut self.arena)
    }

    fn attributes(&mut self, entry: &Entry) -> Result<Attributes> {
        let mut attributes = Attributes {
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            mtime_nsec: entry.mtime_nsec,
            ..Attributes::default()
        };
        for (name, value) in &entry.xattrs {
            if !keep_xattr(name) {
                self.dropped_xattrs += 1;
                continue;
            }
            self.arena.charge_meta((name.len() + value.len()) as u64)?;
            attributes.xattrs.insert(name.clone(), value.clone());
        }
        Ok(attributes)
    }

    fn symlink(&mut self, target: Vec<u8>) -> Result<LeafKind> {
        if target.is_empty() || target.contains(&0) || target.len() > crate::limits::PATH_MAX {
            return Err(LayerError::input(
                "the target of the symbolic link is empty, too long or has a NUL byte",
            ));
        }
        self.arena.charge_meta(target.len() as u64)?;
        Ok(LeafKind::Symlink(target))
    }

    fn copy_file<R: Read>(
        &mut self,
        archive: &mut Archive<R>,
        size: u64,
        segments: &[Segment],
    ) -> Result<LeafKind> {
        let mut writer = FileWriter::new(&mut self.blob, size, segments);
        self.arena.charge_data(writer.stored_bytes(segments))?;
        self.arena
            .charge_meta(writer.chunks().saturating_mul(CHUNK_INDEX))?;
        for (offset, length) in segments {
            writer.seek(*offset)?;
            archive.read_payload(*length, &mut |part| writer.append(part))?;
        }
        writer.finish().map(LeafKind::File)
    }

    /// Ends the layer. Where replaced files have left much dead data, the blob is written once more, without it, to the empty file `spare`;
    /// only archives can leave any.
    pub fn finish(mut self, spare: Option<File>) -> Result<Converted> {
        let mut root = self.tree.take().unwrap_or_default();
        if let Some(ground) = &self.ground.tree {
            if !self.ground.raised.is_empty() {
                raise(&mut root, ground, &self.ground.raised, &mut self.arena)?;
            }
            inherit(&mut root, ground);
        }
        self.gather(&root)?;
        let (mut blob_file, mut digest, mut length) = self.blob.finish()?;
        let live = live_leaves(&root, self.arena.leaves.len());
        let live_blocks: u64 = live.iter().map(|id| blocks(&self.arena.leaves[*id])).sum();
        let dead_blocks = length / BLOCK - live_blocks;
        let worth_it = dead_blocks > 0 && dead_blocks >= length / BLOCK / DEAD_FRACTION;
        let spare = spare.filter(|_| worth_it);
        let compacted = spare.is_some();
        if let Some(spare) = spare {
            let leaves = &mut self.arena.leaves;
            let written = compact(leaves, &live, &mut blob_file, BlobWriter::new(spare))?;
            (blob_file, digest, length) = written.finish()?;
        }
        let blob = (length > 0).then_some(BlobRef {
            digest,
            blocks: (length / BLOCK) as u32,
        });
        let metadata = erofs::build(
            &root,
            &self.arena.leaves,
            blob.as_ref(),
            self.arena.limits.meta_bytes,
        )?;
        Ok(Converted {
            metadata,
            blob,
            blob_file,
            compacted,
            entries: self.entries,
            dropped_xattrs: self.dropped_xattrs,
        })
    }
}

pub fn check_device(major: u32, minor: u32) -> Result<()> {
    if major > MAJOR_MAX || minor > MINOR_MAX {
        return Err(LayerError::input(format!(
            "device {major}:{minor} is out of range"
        )));
    }
    Ok(())
}

fn count_directories(top: &Directory) -> u64 {
    let below = top.children.values().map(|node| match node {
        Node::Directory(child) => count_directories(child),
        Node::Leaf(_) | Node::Whiteout => 0,
    });
    1 + below.sum::<u64>()
}

fn blocks(leaf: &Leaf) -> u64 {
    match &leaf.kind {
        LeafKind::File(data) => data.blocks(),
        _ => 0,
    }
}

/// The leaves that a name leads to, in the order of the archives.
fn live_leaves(root: &Directory, count: usize) -> Vec<usize> {
    let mut live = vec![false; count];
    let mut pending = vec![root];
    while let Some(directory) = pending.pop() {
        for node in directory.children.values() {
            match node {
                Node::Directory(child) => pending.push(child),
                Node::Leaf(id) => live[*id] = true,
                Node::Whiteout => {}
            }
        }
    }
    (0..count).filter(|id| live[*id]).collect()
}

/// Copies what live files have in the blob `old` to `new`, and makes them point there.
fn compact(
    leaves: &mut [Leaf],
    live: &[usize],
    old: &mut File,
    mut new: BlobWriter,
) -> Result<BlobWriter> {
    image::move_data(leaves, live.iter().copied(), old, &mut new)?;
    Ok(new)
}
