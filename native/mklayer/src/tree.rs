//! The tree of files that a layer holds: built from the entries of one archive, then merged with the archives above it.
//!
//! Whiteouts follow the OCI image specification ("Representing Changes"): `.wh.NAME` hides NAME of the layers below, `.wh..wh..opq` hides
//! everything below that directory, and neither touches what the same layer brings, in whatever order the entries stand.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::{LayerError, Result};
use crate::extents::FileData;
use crate::limits::{Limits, NAME_MAX, PATH_MAX, SYMLINKS_MAX};

const WHITEOUT_PREFIX: &[u8] = b".wh.";
/// Names that begin like this are aufs' own bookkeeping, but for the mark of an opaque directory.
const AUFS_PREFIX: &[u8] = b".wh..wh.";
const OPAQUE_MARK: &[u8] = b".wh..wh..opq";

/// Bytes that one entry takes in memory and in the metadata beyond its name and attributes (inode, directory entry, tree nodes).
const ENTRY_COST: u64 = 200;

/// Extended attributes, name to value.
pub type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// What every kind of file has.
#[derive(Clone, Debug, Default)]
pub struct Attributes {
    /// Permission bits, 0o7777.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: i64,
    pub mtime_nsec: u32,
    /// Only those that `keep_xattr` lets through.
    pub xattrs: Xattrs,
}

impl Attributes {
    /// Whether all but the time is alike.
    fn grants_like(&self, other: &Attributes) -> bool {
        let all = |of: &Attributes| (of.mode, of.uid, of.gid);
        all(self) == all(other) && self.xattrs == other.xattrs
    }
}

/// A file that isn't a directory. It stands in an arena, because several names can lead to it.
#[derive(Clone, Debug)]
pub struct Leaf {
    pub attributes: Attributes,
    pub kind: LeafKind,
}

impl Leaf {
    /// Takes over what another name of the same file says of it. Only the owner of a symbolic link can be set through one.
    pub fn adopt(&mut self, said: Attributes) {
        let own = &mut self.attributes;
        (own.uid, own.gid) = (said.uid, said.gid);
        if matches!(self.kind, LeafKind::Symlink(_)) {
            return;
        }
        own.mode = said.mode;
        (own.mtime, own.mtime_nsec) = (said.mtime, said.mtime_nsec);
        own.xattrs.extend(said.xattrs);
    }
}

#[derive(Clone, Debug)]
pub enum LeafKind {
    File(FileData),
    Symlink(Vec<u8>),
    CharDevice { major: u32, minor: u32 },
    BlockDevice { major: u32, minor: u32 },
    Fifo,
    Socket,
}

/// Index of a leaf in the arena.
pub type LeafId = usize;

#[derive(Debug)]
pub enum Node {
    Directory(Box<Directory>),
    Leaf(LeafId),
    Whiteout,
}

#[derive(Debug, Default)]
pub struct Directory {
    pub attributes: Attributes,
    /// No entry named it: the attributes are made up, and give way to those of a layer below.
    pub synthesized: bool,
    /// Hides what the layers below have in it.
    pub opaque: bool,
    /// Sorted by name, bytewise.
    pub children: BTreeMap<Vec<u8>, Node>,
}

impl Directory {
    fn synthesized(mode: u16) -> Self {
        Directory {
            attributes: Attributes {
                mode,
                ..Attributes::default()
            },
            synthesized: true,
            ..Directory::default()
        }
    }

    fn has_directory(&self, path: &[Vec<u8>]) -> bool {
        let found = path.iter().try_fold(self, |directory, name| {
            match directory.children.get(name)? {
                Node::Directory(child) => Some(&**child),
                _ => None,
            }
        });
        found.is_some()
    }
}

/// What a stack of trees (highest first) shows at `path` and isn't a directory that others below add to: whiteouts are shown as such.
fn shown<'t>(stack: &[&'t Directory], path: &[Vec<u8>]) -> Option<&'t Node> {
    let (name, parents) = path.split_last()?;
    let mut stack = uncovered(stack.iter().copied());
    for parent in parents {
        stack = step(&stack, parent);
    }
    stack
        .iter()
        .find_map(|directory| directory.children.get(name))
}

/// What overlayfs lacks to show a stack of trees (highest first) as merging them would: it takes the attributes of a directory from the highest layer
/// that has it, also where no entry named it there and they are made up. None: nothing is lacking.
pub fn cover(stack: &[&Directory]) -> Option<Directory> {
    cover_of(&uncovered(stack.iter().copied()))
}

/// A symbolic link that a directory which no entry named would hide in a stack (highest first): its path, and where it leads. What its layer's own
/// archive would have put behind the link is in the directory instead, and all that the link led to would be gone.
pub fn hidden_link(stack: &[&Directory], arena: &Arena) -> Option<(Vec<u8>, Vec<u8>)> {
    let stack = uncovered(stack.iter().copied());
    let [upper @ .., _] = stack.as_slice() else {
        return None;
    };
    let names: BTreeSet<&Vec<u8>> = upper.iter().flat_map(|one| one.children.keys()).collect();
    names.into_iter().find_map(|name| {
        let mut shown = stack
            .iter()
            .filter_map(|directory| directory.children.get(name))
            .skip_while(
                |node| matches!(node, Node::Directory(one) if one.synthesized && !one.opaque),
            )
            .peekable();
        let passed_through = stack
            .iter()
            .find_map(|directory| directory.children.get(name))
            .is_some_and(|node| matches!(node, Node::Directory(one) if one.synthesized));
        if let (true, Some(Node::Leaf(id))) = (passed_through, shown.peek()) {
            if let LeafKind::Symlink(target) = &arena.leaves[*id].kind {
                return Some((name.clone(), target.clone()));
            }
        }
        let (below, target) = hidden_link(&step(&stack, name), arena)?;
        Some(([name.as_slice(), &below].join(&b'/'), target))
    })
}

fn cover_of(stack: &[&Directory]) -> Option<Directory> {
    let [upper @ .., _] = stack else { return None };
    let highest = upper.first()?;
    let named = stack.iter().find(|directory| !directory.synthesized);
    let names: BTreeSet<&Vec<u8>> = upper.iter().flat_map(|one| one.children.keys()).collect();
    let below = |name| Some((Vec::clone(name), cover_of(&step(stack, name))?));
    let children: BTreeMap<Vec<u8>, Node> = names
        .into_iter()
        .filter_map(below)
        .map(|(name, made)| (name, Node::Directory(Box::new(made))))
        .collect();
    // A made-up time alone isn't worth a layer.
    let differs = named.is_some_and(|named| {
        highest.synthesized && !highest.attributes.grants_like(&named.attributes)
    });
    if children.is_empty() && !differs {
        return None;
    }
    Some(Directory {
        attributes: named.unwrap_or(highest).attributes.clone(),
        synthesized: named.is_none(),
        opaque: false,
        children,
    })
}

/// The directories of that name in the directories of a stack, highest first, as far down as it is one.
fn step<'t>(stack: &[&'t Directory], name: &Vec<u8>) -> Vec<&'t Directory> {
    let below = stack
        .iter()
        .map_while(|directory| match directory.children.get(name) {
            None => Some(None),
            Some(Node::Directory(child)) => Some(Some(&**child)),
            Some(Node::Leaf(_) | Node::Whiteout) => None,
        });
    uncovered(below.flatten())
}

/// Those of the directories, highest first, that no opaque one hides.
fn uncovered<'t>(directories: impl Iterator<Item = &'t Directory>) -> Vec<&'t Directory> {
    let mut seen = Vec::new();
    for directory in directories {
        seen.push(directory);
        if directory.opaque {
            break;
        }
    }
    seen
}

/// Gives files of `lower` that `raised` has others for these in `upper`, under all names of theirs that it doesn't hide.
pub fn raise(
    upper: &mut Directory,
    lower: &Directory,
    raised: &BTreeMap<LeafId, LeafId>,
    arena: &mut Arena,
) -> Result<()> {
    if upper.opaque {
        return Ok(());
    }
    for (name, node) in &lower.children {
        let made = match (node, upper.children.get_mut(name)) {
            (Node::Leaf(id), None) => match raised.get(id) {
                Some(own) => Node::Leaf(*own),
                None => continue,
            },
            (Node::Directory(below), None) => {
                let mut made = Directory {
                    synthesized: true,
                    ..Directory::default()
                };
                raise(&mut made, below, raised, arena)?;
                if made.children.is_empty() {
                    continue;
                }
                Node::Directory(Box::new(made))
            }
            (Node::Directory(below), Some(Node::Directory(above))) => {
                raise(above, below, raised, arena)?;
                continue;
            }
            _ => continue,
        };
        arena.count_entry()?;
        arena.charge_meta(name.len() as u64)?;
        upper.children.insert(name.clone(), made);
    }
    Ok(())
}

/// Gives directories of `upper` that no entry named the attributes of those that they lie on.
pub fn inherit(upper: &mut Directory, lower: &Directory) {
    if upper.opaque {
        return;
    }
    if upper.synthesized {
        upper.attributes = lower.attributes.clone();
        upper.synthesized = lower.synthesized;
    }
    for (name, node) in &mut upper.children {
        if let (Node::Directory(above), Some(Node::Directory(below))) =
            (node, lower.children.get(name))
        {
            inherit(above, below);
        }
    }
}

/// Mode of a directory that no entry names. Three of them aren't 0755 on any Unix system, and a layer that only adds to them must not change them.
fn synthesized_mode(path: &[Vec<u8>]) -> u16 {
    let path: Vec<&[u8]> = path.iter().map(Vec::as_slice).collect();
    match path[..] {
        [b"tmp"] | [b"var", b"tmp"] => 0o1777,
        [b"root"] => 0o700,
        _ => 0o755,
    }
}

/// Whether an xattr from outside is kept. `trusted.*` and `user.overlay.*` would steer overlayfs; labels of another host's security module mean nothing here.
pub fn keep_xattr(name: &[u8]) -> bool {
    name == b"security.capability"
        || (name.starts_with(b"user.") && !name.starts_with(b"user.overlay."))
}

/// Where a name of an archive leads to: its normalized components.
///
/// # Errors
/// NUL bytes, `..`, an empty name, a component or path that is too long, too many components.
pub fn components(name: &[u8], limits: &Limits) -> Result<Vec<Vec<u8>>> {
    if name.is_empty() {
        return Err(LayerError::input("an empty name"));
    }
    if name.contains(&0) {
        return Err(LayerError::input("a NUL byte in the name"));
    }
    let parts: Vec<Vec<u8>> = name
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .map(<[u8]>::to_vec)
        .collect();
    if parts.iter().any(|part| part == b"..") {
        return Err(LayerError::input("\"..\" in the name"));
    }
    check_place(&parts, limits)?;
    Ok(parts)
}

fn check_place(path: &[Vec<u8>], limits: &Limits) -> Result<()> {
    if let Some(long) = path.iter().find(|part| part.len() > NAME_MAX) {
        return Err(LayerError::input(format!(
            "a name of {} bytes, at most {NAME_MAX} are allowed",
            long.len()
        )));
    }
    if path.len() > limits.depth {
        return Err(LayerError::input(format!(
            "{} directories below each other, at most {} are allowed",
            path.len(),
            limits.depth
        )));
    }
    let length = path.iter().map(|part| part.len() + 1).sum::<usize>();
    if length > PATH_MAX {
        return Err(LayerError::input(format!(
            "a path of {length} bytes, at most {PATH_MAX} are allowed"
        )));
    }
    Ok(())
}

/// All files of a conversion, and what they have cost so far.
pub struct Arena {
    pub leaves: Vec<Leaf>,
    pub limits: Limits,
    entries: u64,
    meta_bytes: u64,
    data_bytes: u64,
}

impl Arena {
    pub fn new(limits: Limits) -> Self {
        Arena {
            leaves: Vec::new(),
            limits,
            entries: 0,
            meta_bytes: 0,
            data_bytes: 0,
        }
    }

    /// Entries counted so far.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    pub fn count_entry(&mut self) -> Result<()> {
        self.entries += 1;
        if self.entries > self.limits.entries {
            return Err(LayerError::input(format!(
                "more than {} entries",
                self.limits.entries
            )));
        }
        self.charge_meta(ENTRY_COST)
    }

    /// Counts bytes that the metadata, and our memory, will hold.
    pub fn charge_meta(&mut self, bytes: u64) -> Result<()> {
        self.meta_bytes = self.meta_bytes.saturating_add(bytes);
        if self.meta_bytes > self.limits.meta_bytes {
            return Err(LayerError::input(format!(
                "names, attributes and extents exceed {} bytes",
                self.limits.meta_bytes
            )));
        }
        Ok(())
    }

    /// Counts bytes that go into the blob.
    pub fn charge_data(&mut self, bytes: u64) -> Result<()> {
        self.data_bytes = self.data_bytes.saturating_add(bytes);
        if self.data_bytes > self.limits.data_bytes {
            return Err(LayerError::input(format!(
                "file contents exceed {} bytes",
                self.limits.data_bytes
            )));
        }
        Ok(())
    }

    /// Lets go of what was counted, but for the memory that it takes: it was counted when it was made.
    pub fn uncount(&mut self) {
        (self.entries, self.data_bytes) = (0, 0);
    }

    pub fn add(&mut self, leaf: Leaf) -> LeafId {
        self.leaves.push(leaf);
        self.leaves.len() - 1
    }
}

/// Builds the tree of one archive.
pub struct LayerBuilder<'a> {
    /// What lies below it, highest first: what the archives of this layer amount to, and the layers under it.
    below: Vec<&'a Directory>,
    root: Directory,
}

/// A normalized place in the layer: symlinks among the parents are resolved.
pub struct Place {
    parent: Vec<Vec<u8>>,
    /// None: the root itself.
    name: Option<Vec<u8>>,
}

/// What an entry's name asks for.
pub enum Target {
    File(Place),
    Whiteout(Place),
    Opaque(Place),
    /// Bookkeeping of aufs: dropped.
    Ignored,
}

impl<'a> LayerBuilder<'a> {
    pub fn new(below: impl IntoIterator<Item = &'a Directory>) -> Self {
        LayerBuilder {
            below: below.into_iter().collect(),
            root: Directory::synthesized(0o755),
        }
    }

    pub fn finish(self) -> Directory {
        self.root
    }

    /// Finds out what the path means: a file, a whiteout, a mark.
    pub fn target(&self, mut path: Vec<Vec<u8>>, arena: &Arena) -> Result<Target> {
        let Some(name) = path.pop() else {
            return Ok(Target::File(Place {
                parent: Vec::new(),
                name: None,
            }));
        };
        if path.iter().any(|part| part.starts_with(AUFS_PREFIX)) {
            return Ok(Target::Ignored);
        }
        if path.iter().any(|part| part.starts_with(WHITEOUT_PREFIX)) {
            return Err(LayerError::input("a whiteout is used as a directory"));
        }
        let parent = self.resolve(path, arena)?;
        if name == OPAQUE_MARK {
            return Ok(Target::Opaque(Place { parent, name: None }));
        }
        if name.starts_with(AUFS_PREFIX) {
            return Ok(Target::Ignored);
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT_PREFIX) {
            if matches!(hidden, b"" | b"." | b"..") {
                return Err(LayerError::input("a whiteout of no file"));
            }
            let name = Some(hidden.to_vec());
            return Ok(Target::Whiteout(Place { parent, name }));
        }
        Ok(Target::File(Place {
            parent,
            name: Some(name),
        }))
    }

    /// Follows symlinks among the directories of a path, as extracting into a root directory would: they never lead out of it.
    fn resolve(&self, path: Vec<Vec<u8>>, arena: &Arena) -> Result<Vec<Vec<u8>>> {
        if self.root.has_directory(&path) {
            return Ok(path);
        }
        let mut pending = VecDeque::from(path);
        let mut resolved: Vec<Vec<u8>> = Vec::new();
        let mut followed = 0;
        while let Some(name) = pending.pop_front() {
            if name == b".." {
                resolved.pop();
                continue;
            }
            let Some(target) = self.symlink_at(&resolved, &name, arena) else {
                resolved.push(name);
                check_place(&resolved, &arena.limits)?;
                continue;
            };
            followed += 1;
            if followed > SYMLINKS_MAX {
                return Err(LayerError::input(
                    "too many symbolic links among its parents",
                ));
            }
            if target.starts_with(b"/") {
                resolved.clear();
            }
            for part in target.rsplit(|byte| *byte == b'/') {
                if !part.is_empty() && part != b"." {
                    pending.push_front(part.to_vec());
                }
            }
        }
        Ok(resolved)
    }

    /// The target of the symlink `name` in the directory at `parent`, in this layer or, where it has nothing there, below it.
    fn symlink_at<'b>(
        &self,
        parent: &[Vec<u8>],
        name: &[u8],
        arena: &'b Arena,
    ) -> Option<&'b [u8]> {
        let Node::Leaf(id) = self.shown(parent, name)? else {
            return None;
        };
        match &arena.leaves[*id].kind {
            LeafKind::Symlink(target) => Some(target),
            _ => None,
        }
    }

    fn shown(&self, parent: &[Vec<u8>], name: &[u8]) -> Option<&Node> {
        let mut stack = vec![&self.root];
        stack.extend(&self.below);
        let mut path = parent.to_vec();
        path.push(name.to_vec());
        shown(&stack, &path)
    }

    /// The directory at `path`, whose missing parts are made.
    fn directory(&mut self, path: &[Vec<u8>], arena: &mut Arena) -> Result<&mut Directory> {
        let mut directory = &mut self.root;
        for (depth, name) in path.iter().enumerate() {
            if !directory.children.contains_key(name) {
                arena.count_entry()?;
                arena.charge_meta(name.len() as u64)?;
                let made = Directory::synthesized(synthesized_mode(&path[..=depth]));
                directory
                    .children
                    .insert(name.clone(), Node::Directory(Box::new(made)));
            }
            let child = directory.children.get_mut(name);
            directory = match child {
                Some(Node::Directory(child)) => child,
                Some(whiteout @ Node::Whiteout) => {
                    let mut made = Directory::synthesized(synthesized_mode(&path[..=depth]));
                    made.opaque = true;
                    *whiteout = Node::Directory(Box::new(made));
                    let Node::Directory(child) = whiteout else {
                        unreachable!("just assigned")
                    };
                    child
                }
                _ => {
                    return Err(LayerError::input(format!(
                        "its parent \"{}\" is no directory",
                        name.escape_ascii()
                    )))
                }
            };
        }
        Ok(directory)
    }

    /// Makes a directory that no entry names, unless it is there.
    pub fn make_directory(&mut self, place: &Place, arena: &mut Arena) -> Result<()> {
        let path: Vec<_> = place.parent.iter().chain(&place.name).cloned().collect();
        self.directory(&path, arena).map(|_| ())
    }

    /// A directory entry: it gives a directory that is there its attributes, and replaces anything else.
    pub fn put_directory(
        &mut self,
        place: &Place,
        attributes: Attributes,
        arena: &mut Arena,
    ) -> Result<()> {
        let parent = self.directory(&place.parent, arena)?;
        let Some(name) = &place.name else {
            parent.attributes = attributes;
            parent.synthesized = false;
            return Ok(());
        };
        arena.charge_meta(name.len() as u64)?;
        let (children, opaque) = match parent.children.remove(name) {
            Some(Node::Directory(known)) => (known.children, known.opaque),
            Some(Node::Whiteout) => (BTreeMap::new(), true),
            Some(Node::Leaf(_)) | None => (BTreeMap::new(), false),
        };
        let directory = Directory {
            attributes,
            synthesized: false,
            opaque,
            children,
        };
        parent
            .children
            .insert(name.clone(), Node::Directory(Box::new(directory)));
        Ok(())
    }

    /// An entry for anything but a directory: it replaces what is there.
    pub fn put_leaf(&mut self, place: &Place, leaf: LeafId, arena: &mut Arena) -> Result<()> {
        let Some(name) = &place.name else {
            return Err(LayerError::input("the root must be a directory"));
        };
        arena.charge_meta(name.len() as u64)?;
        let parent = self.directory(&place.parent, arena)?;
        parent.children.insert(name.clone(), Node::Leaf(leaf));
        Ok(())
    }

    /// Finds the file that a hard link names.
    pub fn link_target(&self, path: Vec<Vec<u8>>, arena: &Arena) -> Result<LeafId> {
        let missing =
            || LayerError::input("the target of the hard link is neither in the archive nor below");
        let mut parent = path;
        let name = parent.pop().ok_or_else(missing)?;
        let parent = self.resolve(parent, arena)?;
        match self.shown(&parent, &name) {
            Some(Node::Leaf(id)) => Ok(*id),
            Some(Node::Directory(_)) => Err(LayerError::input("a hard link to a directory")),
            Some(Node::Whiteout) | None => Err(missing()),
        }
    }

    pub fn put_whiteout(&mut self, place: &Place, arena: &mut Arena) -> Result<()> {
        let Some(name) = &place.name else {
            return Err(LayerError::input("a whiteout of the root"));
        };
        arena.charge_meta(name.len() as u64)?;
        let parent = self.directory(&place.parent, arena)?;
        match parent.children.get_mut(name) {
            // What this layer brings stays; only the layers below are hidden.
            Some(Node::Directory(directory)) => directory.opaque = true,
            Some(Node::Leaf(_) | Node::Whiteout) => {}
            None => {
                parent.children.insert(name.clone(), Node::Whiteout);
            }
        }
        Ok(())
    }

    pub fn put_opaque(&mut self, place: &Place, arena: &mut Arena) -> Result<()> {
        self.directory(&place.parent, arena)?.opaque = true;
        Ok(())
    }
}

/// What `lower` with `upper` on top of it amounts to. Whiteouts and opaque marks stay: there may be more layers below.
pub fn merge(mut lower: Directory, upper: Directory) -> Directory {
    if upper.opaque {
        return upper;
    }
    for (name, node) in upper.children {
        let below = lower.children.remove(&name);
        let merged = match (node, below) {
            (Node::Directory(above), Some(Node::Directory(below))) => {
                Node::Directory(Box::new(merge(*below, *above)))
            }
            (Node::Directory(mut above), Some(Node::Leaf(_) | Node::Whiteout)) => {
                above.opaque = true;
                Node::Directory(above)
            }
            (node, _) => node,
        };
        lower.children.insert(name, merged);
    }
    if !upper.synthesized {
        lower.attributes = upper.attributes;
        lower.synthesized = false;
    }
    lower
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Vec<Vec<u8>> {
        components(text.as_bytes(), &Limits::default()).unwrap()
    }

    fn leaf(arena: &mut Arena, kind: LeafKind) -> LeafId {
        arena.add(Leaf {
            attributes: Attributes::default(),
            kind,
        })
    }

    /// Builds a layer from names: `x/` a directory, `x` a fifo, `x -> y` a symlink; whiteouts by their names.
    fn layer(below: Option<&Directory>, arena: &mut Arena, names: &[&str]) -> Directory {
        let mut builder = LayerBuilder::new(below);
        for name in names {
            let (name, link) = name.split_once(" -> ").unwrap_or((name, ""));
            match builder.target(path(name), arena).unwrap() {
                Target::File(place) if name.ends_with('/') => {
                    let attributes = Attributes {
                        mode: 0o700,
                        ..Attributes::default()
                    };
                    builder.put_directory(&place, attributes, arena).unwrap();
                }
                Target::File(place) => {
                    let kind = match link {
                        "" => LeafKind::Fifo,
                        target => LeafKind::Symlink(target.as_bytes().to_vec()),
                    };
                    let id = leaf(arena, kind);
                    builder.put_leaf(&place, id, arena).unwrap();
                }
                Target::Whiteout(place) => builder.put_whiteout(&place, arena).unwrap(),
                Target::Opaque(place) => builder.put_opaque(&place, arena).unwrap(),
                Target::Ignored => {}
            }
        }
        builder.finish()
    }

    fn show(directory: &Directory, prefix: &str, lines: &mut Vec<String>) {
        for (name, node) in &directory.children {
            let name = format!("{prefix}{}", String::from_utf8_lossy(name));
            match node {
                Node::Directory(child) => {
                    lines.push(format!(
                        "{name}/{}",
                        if child.opaque { " opaque" } else { "" }
                    ));
                    show(child, &format!("{name}/"), lines);
                }
                Node::Leaf(_) => lines.push(name),
                Node::Whiteout => lines.push(format!("{name} whiteout")),
            }
        }
    }

    fn stack(layers: &[&[&str]]) -> Vec<String> {
        let mut arena = Arena::new(Limits::default());
        let mut tree: Option<Directory> = None;
        for names in layers {
            let upper = layer(tree.as_ref(), &mut arena, names);
            tree = Some(match tree {
                Some(lower) => merge(lower, upper),
                None => upper,
            });
        }
        let mut lines = Vec::new();
        show(&tree.unwrap(), "", &mut lines);
        lines
    }

    #[test]
    fn whiteouts_hide_lower_layers_only() {
        assert_eq!(
            stack(&[&["a", "b"], &[".wh.a", "c"]]),
            ["a whiteout", "b", "c"]
        );
        assert_eq!(stack(&[&["a/x"], &[".wh.a", "a/y"]]), ["a/ opaque", "a/y"]);
        assert_eq!(stack(&[&["a/x"], &["a/y", ".wh.a"]]), ["a/ opaque", "a/y"]);
        assert_eq!(
            stack(&[&["a/x"], &["a/.wh..wh..opq", "a/y"]]),
            ["a/ opaque", "a/y"]
        );
        assert_eq!(
            stack(&[&["a/x"], &["a/y", "a/.wh..wh..opq"]]),
            ["a/ opaque", "a/y"]
        );
        assert_eq!(stack(&[&["a"], &["a", ".wh.a"]]), ["a"]);
        assert_eq!(stack(&[&["a/x", "b"], &[".wh..wh..opq", "c"]]), ["c"]);
    }

    #[test]
    fn a_directory_over_something_else_hides_what_was_below_that() {
        assert_eq!(stack(&[&["a"], &["a/x"]]), ["a/ opaque", "a/x"]);
        assert_eq!(stack(&[&[".wh.a"], &["a/x"]]), ["a/ opaque", "a/x"]);
        assert_eq!(stack(&[&["a/x"], &["a"]]), ["a"]);
    }

    #[test]
    fn aufs_leftovers_are_dropped() {
        assert_eq!(
            stack(&[&[".wh..wh.plnk/", ".wh..wh.plnk/12.34", ".wh..wh.aufs", "a"]]),
            ["a"]
        );
    }

    #[test]
    fn symlinked_parents_are_followed_inside_the_root() {
        assert_eq!(
            stack(&[&["usr/bin/a", "bin -> usr/bin", "bin/b"]]),
            ["bin", "usr/", "usr/bin/", "usr/bin/a", "usr/bin/b"]
        );
        assert_eq!(
            stack(&[&["bin -> ../../usr"], &["bin/b"]]),
            ["bin", "usr/", "usr/b"]
        );
        assert_eq!(
            stack(&[&["x/l -> /y", "x/l/b"]]),
            ["x/", "x/l", "y/", "y/b"]
        );
        let mut arena = Arena::new(Limits::default());
        let below = layer(None, &mut arena, &["a -> b", "b -> a"]);
        let builder = LayerBuilder::new(Some(&below));
        assert!(builder.target(path("a/x"), &arena).is_err());
    }

    #[test]
    fn later_entries_replace_earlier_ones() {
        assert_eq!(stack(&[&["a/x", "a"]]), ["a"]);
        assert_eq!(stack(&[&["a", "a/"]]), ["a/"]);
        assert_eq!(stack(&[&["l -> x", "l/"]]), ["l/"]);
    }

    #[test]
    fn an_unnamed_parent_keeps_the_attributes_of_the_layer_below() {
        let mut arena = Arena::new(Limits::default());
        let lower = layer(None, &mut arena, &["d/"]);
        let upper = layer(Some(&lower), &mut arena, &["d/x"]);
        let Some(Node::Directory(merged)) = merge(lower, upper).children.remove(b"d".as_slice())
        else {
            panic!("d is gone");
        };
        assert_eq!(merged.attributes.mode, 0o700);
    }

    #[test]
    fn hostile_names_are_refused() {
        let limits = Limits::default();
        let long = "n".repeat(256);
        let deep = "d/".repeat(1025);
        for name in ["", "a/../b", "..", "a\0b", &long, &deep] {
            assert!(components(name.as_bytes(), &limits).is_err(), "{name:.20}");
        }
        assert_eq!(components(b"//a/./b/", &limits).unwrap(), [b"a", b"b"]);
    }

    #[test]
    fn a_cover_gives_directories_what_lower_layers_say_of_them() {
        let mut arena = Arena::new(Limits::default());
        let base = layer(None, &mut arena, &["home/", "home/agent/", "opt/", "srv/"]);
        let workspace = layer(
            None,
            &mut arena,
            &["home/agent/repo/file", "opt/tool", "new/x"],
        );
        let toolkit = layer(
            None,
            &mut arena,
            &["srv/.wh..wh..opq", "srv/y", ".wh.opt", "home/z"],
        );
        let made = cover(&[&toolkit, &workspace, &base]).unwrap();
        // Of `srv` the toolkit says what is in it, `opt` it hides, and `new` is named by nobody.
        let mut lines = Vec::new();
        show(&made, "", &mut lines);
        assert_eq!(lines, ["home/", "home/agent/"]);
        let Some(Node::Directory(home)) = made.children.get(b"home".as_slice()) else {
            unreachable!("just listed")
        };
        assert_eq!((home.attributes.mode, home.synthesized), (0o700, false));
        assert!(cover(&[&workspace]).is_none() && cover(&[]).is_none());
        assert!(cover(&[&base, &workspace]).is_none(), "the base names them");
        assert!(cover(&[&made, &toolkit, &workspace, &base]).is_none());
    }

    #[test]
    fn a_link_leads_to_no_name_that_cannot_be() {
        let mut arena = Arena::new(Limits::default());
        let long = format!("link -> {}", "y".repeat(256));
        let lower = layer(None, &mut arena, &[&long]);
        let builder = LayerBuilder::new([&lower]);
        assert!(builder.target(path("link/file"), &arena).is_err());
    }

    #[test]
    fn only_harmless_xattrs_are_kept() {
        assert!(keep_xattr(b"user.note"));
        assert!(keep_xattr(b"security.capability"));
        for name in [
            "trusted.overlay.opaque",
            "user.overlay.whiteout",
            "trusted.x",
            "security.selinux",
            "system.posix_acl_access",
        ] {
            assert!(!keep_xattr(name.as_bytes()), "{name}");
        }
    }
}
