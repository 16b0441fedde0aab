//! Is a metadata file, which came from elsewhere, one that this program has made, or could have made?
//!
//! What it says is read into a tree, and the tree is written anew: only the very same bytes pass. So whoever can forge such a file can say with it
//! what any archive can say, and nothing else reaches the kernel: no feature, layout or attribute, and no damage to a structure, that `erofs` doesn't write.

use crate::blob::BLOCK;
use crate::erofs::{self, BlobRef, Metadata};
use crate::error::{LayerError, Result};
use crate::image::{self, broken};
use crate::limits::Limits;
use crate::tree::{Arena, Leaf, LeafKind};

/// What was found in a file that passed.
pub struct Checked {
    pub metadata: Metadata,
    pub blob: Option<BlobRef>,
    pub entries: u64,
}

/// Checks the whole of a metadata file. Memory: what the limits allow for its tree, and its size once more.
///
/// # Errors
/// It isn't what `erofs` writes for any tree that a layer may have, or its files reach beyond the blob that it names.
pub fn check(metadata: &[u8], limits: &Limits) -> Result<Checked> {
    let mut arena = Arena::new(limits.clone());
    let root = image::read(metadata, &mut arena)?;
    let blob = image::blob(metadata)?;
    let blocks = blob.as_ref().map_or(0, |blob| u64::from(blob.blocks));
    if arena.leaves.iter().any(|leaf| end_in_blob(leaf) > blocks) {
        return Err(broken("a file reaches beyond its data"));
    }
    let written = erofs::build(&root, &arena.leaves, blob.as_ref(), limits.meta_bytes)?;
    if written.image != metadata {
        return Err(broken("no tree is written like this"));
    }
    if blocks > limits.data_bytes / BLOCK {
        return Err(LayerError::input(format!(
            "{blocks} blocks of data, {} are allowed",
            limits.data_bytes / BLOCK
        )));
    }
    let entries = arena.entries();
    // The process ends with this: to take a large tree apart would cost a fifth of its time.
    std::mem::forget((root, arena));
    Ok(Checked {
        metadata: written,
        blob,
        entries,
    })
}

/// The block behind the last one that a file has in the blob.
fn end_in_blob(leaf: &Leaf) -> u64 {
    let LeafKind::File(data) = &leaf.kind else {
        return 0;
    };
    let ends = data
        .runs
        .iter()
        .map(|run| u64::from(run.block) + data.run_blocks(run));
    ends.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extents::{FileData, Run};
    use crate::tree::{Attributes, Directory, Node};

    /// Places in the file that `layer` gives: its superblock, and inodes in the order of their names.
    const SUPERBLOCK: usize = 1024;
    const DEVICE_SLOT: usize = 1152;
    const ROOT: usize = 1280;

    fn attributes(mode: u16, xattrs: &[(&str, &str)]) -> Attributes {
        let own = |(name, value): &(&str, &str)| (name.as_bytes().into(), value.as_bytes().into());
        Attributes {
            mode,
            uid: 7,
            mtime: 1_700_000_000,
            mtime_nsec: 999_999_999,
            xattrs: xattrs.iter().map(own).collect(),
            ..Attributes::default()
        }
    }

    /// A layer with one of everything, and 3 blocks of data, of which the file `data` has the second and third.
    fn layer() -> Vec<u8> {
        let data = FileData {
            size: 5000,
            chunk_bits: 13,
            runs: vec![Run {
                first_chunk: 0,
                chunks: 1,
                block: 1,
            }],
        };
        let kinds = [
            ("data", LeafKind::File(data)),
            ("empty", LeafKind::File(FileData::default())),
            ("fifo", LeafKind::Fifo),
            ("link", LeafKind::Symlink(b"data".to_vec())),
            ("null", LeafKind::CharDevice { major: 1, minor: 3 }),
            ("socket", LeafKind::Socket),
        ];
        let mut leaves = Vec::new();
        let mut below = Directory {
            attributes: attributes(0o755, &[("user.note", "kept")]),
            opaque: true,
            ..Directory::default()
        };
        for (name, kind) in kinds {
            let attributes = attributes(0o640, &[("user.key", "value")]);
            below.children.insert(name.into(), Node::Leaf(leaves.len()));
            leaves.push(Leaf { attributes, kind });
        }
        // Another name of `data`, more names than one block of a directory holds, and whiteouts.
        below.children.insert(b"again".to_vec(), Node::Leaf(0));
        let mut root = Directory::default();
        for index in 0..40 {
            let name = format!("{index:0200}").into_bytes();
            root.children.insert(name, Node::Whiteout);
        }
        let below = Node::Directory(Box::new(below));
        root.children.insert(b"below".to_vec(), below);
        let blob = BlobRef {
            digest: [0xab; 32],
            blocks: 3,
        };
        let written = erofs::build(&root, &leaves, Some(&blob), 1 << 20).unwrap();
        written.image
    }

    fn complaint(metadata: &[u8]) -> String {
        match check(metadata, &Limits::default()) {
            Ok(_) => String::from("none"),
            Err(error) => error.to_string(),
        }
    }

    /// The same with some bytes changed, and the superblock made to fit.
    fn forged(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut metadata = layer();
        metadata[at..at + bytes.len()].copy_from_slice(bytes);
        erofs::reseal(&mut metadata);
        metadata
    }

    /// Where the inode with that mode stands.
    fn inode(mode: u16) -> usize {
        let metadata = layer();
        let found = (ROOT..metadata.len())
            .step_by(32)
            .find(|at| metadata[at + 4..at + 6] == mode.to_le_bytes() && metadata[*at] & 1 == 1);
        found.unwrap()
    }

    #[test]
    fn what_this_program_writes_passes() {
        let metadata = layer();
        let checked = check(&metadata, &Limits::default()).unwrap();
        assert_eq!(checked.metadata.image, metadata);
        assert_eq!(checked.blob.unwrap().digest, [0xab; 32]);
        assert_eq!(checked.entries, 40 + 1 + 7);
    }

    #[test]
    fn a_resealed_layer_that_says_something_else_passes() {
        // The owner of the root: else the other tests would only show that any change is noticed.
        let metadata = forged(ROOT + 24, &5000_u32.to_le_bytes());
        assert_eq!(complaint(&metadata), "none");
    }

    #[test]
    fn no_byte_can_be_another_one() {
        let metadata = layer();
        for at in 0..metadata.len() {
            let mut changed = metadata.clone();
            changed[at] ^= 1;
            assert!(check(&changed, &Limits::default()).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_cut_or_longer_file_is_refused() {
        let metadata = layer();
        for length in (0..metadata.len()).step_by(61) {
            assert!(check(&metadata[..length], &Limits::default()).is_err());
        }
        let mut longer = metadata;
        longer.resize(longer.len() + 4096, 0);
        erofs::reseal(&mut longer);
        assert_ne!(complaint(&longer), "none");
    }

    #[test]
    fn what_the_kernel_would_read_in_another_way_is_refused() {
        let file = inode(0o100_640);
        let directory = inode(0o040_755);
        let indexes = file + 64 + 12 + 12;
        let cases: &[(&str, usize, &[u8])] = &[
            ("compressed files", SUPERBLOCK + 80, &[1 | 4 | 8]),
            ("a feature that has no name yet", SUPERBLOCK + 83, &[0x80]),
            ("another compatible feature", SUPERBLOCK + 8, &[7]),
            ("blocks of 64 KiB", SUPERBLOCK + 12, &[16]),
            ("more inodes", SUPERBLOCK + 16, &[200]),
            ("two devices", SUPERBLOCK + 86, &[2]),
            ("a device table elsewhere", SUPERBLOCK + 88, &[10]),
            ("shared xattrs", SUPERBLOCK + 40, &[1]),
            ("a name of the data that is none", DEVICE_SLOT, b"/"),
            ("data in capital letters", DEVICE_SLOT, b"A"),
            ("another address of the data", DEVICE_SLOT + 68, &[99]),
            ("less data than files", DEVICE_SLOT + 64, &[2]),
            ("a compact inode", file, &[8]),
            ("an inode of a newer format", file + 1, &[1]),
            ("a compressed inode", file, &[1 | 3 << 1]),
            ("no xattrs where some are", file + 2, &[0]),
            ("a file larger than its chunks", file + 8, &[0, 0, 9]),
            ("a file of 2^60 bytes", file + 15, &[0x10]),
            ("a number twice", file + 20, &[1]),
            (
                "a billion nanoseconds",
                file + 40,
                &1_000_000_000_u32.to_le_bytes(),
            ),
            ("more names than it has", file + 44, &[9]),
            ("xattrs found by a filter", file + 64, &[1]),
            ("shared xattrs of an inode", file + 68, &[1]),
            ("an xattr of another kind", file + 64 + 12 + 1, &[2]),
            ("data in the metadata", indexes + 2, &[0]),
            ("a third device", indexes + 2, &[3]),
            ("data beyond the blob", indexes + 4, &[2]),
            (
                "data far beyond the blob",
                indexes + 4,
                &[0xfe, 0xff, 0xff, 0xff],
            ),
            ("links of a directory", directory + 44, &[9]),
            ("a directory of 4 GB", directory + 12, &[1]),
            ("an odd directory", directory + 8, &[3]),
            ("a root elsewhere", SUPERBLOCK + 14, &[41]),
            ("a root far away", SUPERBLOCK + 14, &[0xff, 0xff]),
        ];
        for (what, at, bytes) in cases {
            let metadata = forged(*at, bytes);
            assert_ne!(metadata, layer(), "{what}");
            let complaint = complaint(&metadata);
            assert!(
                complaint.contains("not a layer of ours"),
                "{what}: {complaint}"
            );
        }
    }

    /// The layer with `from`, which it has once, replaced.
    fn with(from: &[u8], to: &[u8]) -> Vec<u8> {
        assert_eq!(from.len(), to.len());
        let metadata = layer();
        let mut places = metadata.windows(from.len()).enumerate();
        let (at, _) = places.find(|(_, window)| *window == from).unwrap();
        forged(at, to)
    }

    #[test]
    fn attributes_that_steer_overlayfs_are_refused() {
        // `trusted.` and `user.` by their numbers: what overlayfs follows to another file, or to another file's data.
        let mut redirect = layer();
        let note = redirect.windows(8).position(|w| w == b"notekept").unwrap();
        redirect[note - 3] = 4;
        erofs::reseal(&mut redirect);
        assert!(complaint(&redirect).contains("not a layer of ours"));
        let unlike = with(b"overlay.opaquey", b"overlay.opaquex");
        assert!(complaint(&unlike).contains("not a layer of ours"));
    }

    #[test]
    fn names_that_cannot_be_are_refused() {
        for name in [b"so/ket", b"so\0ket", b"..\0\0\0\0", b"fifo\0\0"] {
            assert_ne!(complaint(&with(b"socket", name)), "none", "{name:?}");
        }
        // Out of order: the kernel would find some names by listing and not by looking.
        assert_ne!(complaint(&with(b"socket", b"aocket")), "none");
    }

    #[test]
    fn a_directory_in_itself_is_refused_at_once() {
        // `below` becomes another name of the root, in which it stands.
        let metadata = layer();
        let below = (inode(0o040_755) / 32) as u64;
        let at = metadata
            .windows(8)
            .enumerate()
            .skip(ROOT + 64)
            .find(|(_, window)| *window == below.to_le_bytes())
            .unwrap()
            .0;
        let looped = forged(at, &(ROOT as u64 / 32).to_le_bytes());
        assert!(complaint(&looped).contains("not a layer of ours"));
    }
}
