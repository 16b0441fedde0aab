//! Where a file's data lies in the blob: chunks of a power-of-two size, so that a file without holes needs one index of 8 bytes.

use crate::archive::Segment;
use crate::blob::{BlobWriter, BLOCK, BLOCK_BITS};
use crate::error::Result;

/// Bytes of one chunk index in the metadata.
pub const CHUNK_INDEX: u64 = 8;
/// The format has 5 bits for log2 of blocks per chunk.
const CHUNK_BITS_MAX: u32 = BLOCK_BITS + 31;

/// The content of a regular file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileData {
    /// Bytes.
    pub size: u64,
    /// log2 of the bytes of a chunk.
    pub chunk_bits: u32,
    /// Chunks that lie in the blob, ascending; all others are holes.
    pub runs: Vec<Run>,
}

/// Chunks that follow each other in the file and in the blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub first_chunk: u64,
    pub chunks: u64,
    /// First block in the blob.
    pub block: u32,
}

impl FileData {
    /// Chunks of the file, holes included.
    pub fn chunks(&self) -> u64 {
        self.size.div_ceil(1 << self.chunk_bits)
    }

    /// Blocks that a run takes in the blob: the file's last chunk ends with the file.
    pub fn run_blocks(&self, run: &Run) -> u64 {
        let start = run.first_chunk << self.chunk_bits;
        let end = ((run.first_chunk + run.chunks) << self.chunk_bits).min(self.size);
        (end - start).div_ceil(BLOCK)
    }

    /// Blocks that the file takes in the blob.
    pub fn blocks(&self) -> u64 {
        self.runs.iter().map(|run| self.run_blocks(run)).sum()
    }
}

/// The chunk size (as log2) for which indexes and zeros stored in partly empty chunks take the least space together.
pub fn best_chunk_bits(size: u64, segments: &[Segment]) -> u32 {
    let whole = size.max(1).next_power_of_two().trailing_zeros();
    let whole = whole.clamp(BLOCK_BITS, CHUNK_BITS_MAX);
    if segments == [(0, size)] || segments.is_empty() {
        return whole;
    }
    (BLOCK_BITS..=whole)
        .min_by_key(|bits| {
            stored_bytes(size, segments, *bits) + size.div_ceil(1 << bits) * CHUNK_INDEX
        })
        .unwrap_or(whole)
}

/// Bytes that the chunks which hold data take in the blob.
fn stored_bytes(size: u64, segments: &[Segment], chunk_bits: u32) -> u64 {
    let mut stored = 0;
    let mut next = 0;
    for (offset, length) in segments {
        let first = (offset >> chunk_bits).max(next);
        next = next.max(((offset + length - 1) >> chunk_bits) + 1);
        let end = (next << chunk_bits).min(size.next_multiple_of(BLOCK));
        stored += end.saturating_sub(first << chunk_bits);
    }
    stored
}

/// Takes the data of a file's segments in order and lays them out in the blob.
pub struct FileWriter<'a> {
    blob: &'a mut BlobWriter,
    data: FileData,
    /// File offset up to which the open run is written.
    written: u64,
}

impl<'a> FileWriter<'a> {
    pub fn new(blob: &'a mut BlobWriter, size: u64, segments: &[Segment]) -> Self {
        let chunk_bits = best_chunk_bits(size, segments);
        FileWriter {
            blob,
            data: FileData {
                size,
                chunk_bits,
                runs: Vec::new(),
            },
            written: 0,
        }
    }

    /// Bytes that the file will take in the blob.
    pub fn stored_bytes(&self, segments: &[Segment]) -> u64 {
        stored_bytes(self.data.size, segments, self.data.chunk_bits)
    }

    /// Chunks that the file will have, holes included.
    pub fn chunks(&self) -> u64 {
        self.data.chunks()
    }

    /// Gets ready for data at file offset `offset`, which is at or after the end of what was written.
    pub fn seek(&mut self, offset: u64) -> Result<()> {
        let chunk = offset >> self.data.chunk_bits;
        let run_end = self
            .data
            .runs
            .last()
            .map(|run| run.first_chunk + run.chunks);
        // A chunk that touches the open run goes on with it, zeros in between; any other leaves a hole.
        if run_end.is_none_or(|end| chunk > end) {
            self.close_run()?;
            self.data.runs.push(Run {
                first_chunk: chunk,
                chunks: 0,
                block: self.blob.block()?,
            });
            self.written = chunk << self.data.chunk_bits;
        }
        self.blob.append_zeros(offset - self.written)?;
        self.written = offset;
        Ok(())
    }

    pub fn append(&mut self, part: &[u8]) -> Result<()> {
        self.blob.append(part)?;
        self.written += part.len() as u64;
        if let Some(run) = self.data.runs.last_mut() {
            run.chunks = self.written.div_ceil(1 << self.data.chunk_bits) - run.first_chunk;
        }
        Ok(())
    }

    /// Fills the open run up to the end of its last chunk, or of the file.
    fn close_run(&mut self) -> Result<()> {
        if let Some(run) = self.data.runs.last() {
            let end = (run.first_chunk + run.chunks) << self.data.chunk_bits;
            self.blob
                .append_zeros(end.min(self.data.size).saturating_sub(self.written))?;
            self.blob.align()?;
        }
        Ok(())
    }

    pub fn finish(mut self) -> Result<FileData> {
        self.close_run()?;
        Ok(self.data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_holes_is_one_chunk() {
        for size in [1, 4096, 4097, 1 << 30, (1 << 30) + 1] {
            let bits = best_chunk_bits(size, &[(0, size)]);
            assert!(bits >= BLOCK_BITS && size <= 1 << bits, "{size}");
        }
    }

    #[test]
    fn an_empty_giant_needs_few_indexes() {
        let bits = best_chunk_bits(1 << 44, &[]);
        assert!((1_u64 << 44).div_ceil(1 << bits) <= 2);
    }

    #[test]
    fn small_chunks_are_chosen_where_holes_are_small() {
        let dense: Vec<Segment> = (0..64).map(|index| (index * 8192, 4096)).collect();
        assert_eq!(best_chunk_bits(64 * 8192, &dense), 12);
        // 4 KiB of data in a terabyte: 4 KiB chunks would need 2 GB of indexes.
        let lonely = best_chunk_bits(1 << 40, &[(1 << 39, 4096)]);
        assert!((1_u64 << 40 >> lonely) * CHUNK_INDEX < 1 << 24);
    }
}
