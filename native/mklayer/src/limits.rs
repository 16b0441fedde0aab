//! The bounds that an archive must keep. They protect the memory of the converter, the disk of the node and the kernel that mounts the result.

/// Longest name of one path component in bytes (NAME_MAX, and the most that EROFS can hold).
pub const NAME_MAX: usize = 255;
/// Longest path in bytes (PATH_MAX less its NUL).
pub const PATH_MAX: usize = 4095;
/// Largest file in bytes: 2^44. Block addresses are 32 bit, so no blob can hold more.
pub const FILE_SIZE_MAX: u64 = 1 << 44;
/// Owner ids above 65,535 that one layer may carry: each costs the sandbox's id map an extent.
pub const EXTRA_IDS_MAX: usize = 100;
/// Bytes of one PAX header or GNU long name. Linux allows 64 KiB for one xattr value; a sparse map can be longer.
pub const EXTENSION_MAX: u64 = 1 << 20;
/// Symbolic links followed while the parents of one entry are resolved (the kernel's own limit).
pub const SYMLINKS_MAX: usize = 40;

/// The bounds that the caller can choose.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Entries of all archives together.
    pub entries: u64,
    /// Directories below each other.
    pub depth: usize,
    /// Bytes that the file contents of all archives together take in the blob.
    pub data_bytes: u64,
    /// Bytes of the metadata file; also what names, xattrs and extents may take in memory while the archives are read.
    pub meta_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            entries: 4_000_000,
            depth: 1024,
            data_bytes: 64 << 30,
            meta_bytes: 1 << 30,
        }
    }
}
