//! The data blob: file contents one after the other, each beginning at a block boundary, hashed while they are written.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};

use sha2::{Digest, Sha256};

use crate::error::{LayerError, Result};

/// Bytes of a block: the unit of addresses in the metadata.
pub const BLOCK: u64 = 4096;
/// log2 of `BLOCK`.
pub const BLOCK_BITS: u32 = 12;
/// Bytes that are collected before they are hashed and written.
const BUFFER: usize = 1 << 20;

/// Appends to a blob file.
pub struct BlobWriter {
    file: File,
    hash: Sha256,
    buffer: Vec<u8>,
    flushed: u64,
}

impl BlobWriter {
    pub fn new(file: File) -> Self {
        BlobWriter {
            file,
            hash: Sha256::new(),
            buffer: Vec::with_capacity(BUFFER),
            flushed: 0,
        }
    }

    /// Bytes written so far.
    pub fn position(&self) -> u64 {
        self.flushed + self.buffer.len() as u64
    }

    /// The block at the current position, which must be a block boundary.
    ///
    /// # Errors
    /// The blob has outgrown 32-bit block addresses (16 TiB).
    pub fn block(&self) -> Result<u32> {
        debug_assert_eq!(self.position() % BLOCK, 0);
        // The all-ones address is the format's mark of a hole.
        u32::try_from(self.position() / BLOCK)
            .ok()
            .filter(|block| *block != u32::MAX)
            .ok_or_else(|| LayerError::input("the layer's data exceeds 16 TiB"))
    }

    pub fn append(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let part = data.len().min(BUFFER - self.buffer.len());
            self.buffer.extend_from_slice(&data[..part]);
            data = &data[part..];
            if self.buffer.len() == BUFFER {
                self.flush()?;
            }
        }
        Ok(())
    }

    pub fn append_zeros(&mut self, mut count: u64) -> Result<()> {
        const ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];
        while count > 0 {
            let part = count.min(BLOCK);
            self.append(&ZEROS[..part as usize])?;
            count -= part;
        }
        Ok(())
    }

    /// Fills the last block with zeros.
    pub fn align(&mut self) -> Result<()> {
        let used = self.position() % BLOCK;
        if used == 0 {
            return Ok(());
        }
        self.append_zeros(BLOCK - used)
    }

    fn flush(&mut self) -> Result<()> {
        self.hash.update(&self.buffer);
        self.file
            .write_all(&self.buffer)
            .map_err(|source| LayerError::Io {
                what: "writing the data blob".into(),
                source,
            })?;
        self.flushed += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Ends the blob: its file, its sha256 and its length in bytes.
    pub fn finish(mut self) -> Result<(File, [u8; 32], u64)> {
        self.align()?;
        self.flush()?;
        Ok((self.file, self.hash.finalize().into(), self.flushed))
    }
}

/// Copies `blocks` blocks from `first` of a finished blob to the end of another one.
pub fn copy_blocks(from: &mut File, first: u32, blocks: u64, to: &mut BlobWriter) -> Result<()> {
    let failed = |source| LayerError::Io {
        what: "reading the data blob back".into(),
        source,
    };
    from.seek(SeekFrom::Start(u64::from(first) * BLOCK))
        .map_err(failed)?;
    let mut buffer = vec![0; BUFFER];
    let mut left = blocks * BLOCK;
    while left > 0 {
        let part = left.min(BUFFER as u64) as usize;
        from.read_exact(&mut buffer[..part]).map_err(failed)?;
        to.append(&buffer[..part])?;
        left -= part as u64;
    }
    Ok(())
}
