//! From a frame of the store to a chunk's content: decoded within bounds, and checked.

use std::cell::RefCell;

use sha2::{Digest, Sha256};
use zstd::bulk::Decompressor;

use crate::table::{Entry, Kind};

thread_local! {
    /// One a thread: to make one anew takes a twentieth of the time that a chunk of 256 KiB does. None: no memory for it.
    static DECODER: RefCell<Option<Decompressor<'static>>> = RefCell::new(Decompressor::new().ok());
}

/// Whether `content` is what the table promises.
pub fn is_right(entry: &Entry, content: &[u8]) -> bool {
    Sha256::digest(content)[..] == entry.sha256
}

/// The content of a chunk of `length` bytes, out of its frame.
///
/// # Errors
/// In words: the frame is cut off, decodes to more or less than the chunk, or to something else.
pub fn decode(entry: &Entry, length: u32, frame: Vec<u8>) -> Result<Vec<u8>, &'static str> {
    if frame.len() != entry.length as usize {
        return Err("its frame has the wrong length");
    }
    let content = match entry.kind {
        Kind::Stored => frame,
        // No more than this is ever decoded: a frame that goes on is an error.
        Kind::Zstd => DECODER.with_borrow_mut(|decoder| {
            let decoder = decoder.as_mut().ok_or("there is no memory to decode it")?;
            decoder
                .decompress(&frame, length as usize)
                .map_err(|_| "its frame can't be decoded within the chunk's length")
        })?,
        Kind::Zeros => return Err("zeros have no frame"),
    };
    if content.len() != length as usize {
        return Err("its frame decodes to fewer bytes than the chunk has");
    }
    if !is_right(entry, &content) {
        return Err("its content has another digest");
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zstd_entry(content: &[u8]) -> (Entry, Vec<u8>) {
        let frame = zstd::bulk::compress(content, 3).unwrap();
        let entry = Entry {
            offset: 0,
            length: frame.len() as u32,
            kind: Kind::Zstd,
            sha256: Sha256::digest(content).into(),
        };
        (entry, frame)
    }

    #[test]
    fn the_right_frame_gives_the_content() {
        let content = b"chunk".repeat(1000);
        let (entry, frame) = zstd_entry(&content);
        assert_eq!(decode(&entry, 5000, frame), Ok(content.clone()));
        let stored = Entry {
            length: 5000,
            kind: Kind::Stored,
            ..entry
        };
        assert_eq!(decode(&stored, 5000, content.clone()), Ok(content));
    }

    #[test]
    fn no_other_frame_does() {
        let content = b"chunk".repeat(1000);
        let (entry, frame) = zstd_entry(&content);
        assert!(decode(&entry, 5000, frame[1..].to_vec()).is_err(), "short");
        assert!(decode(&entry, 4999, frame.clone()).is_err(), "too much");
        assert!(decode(&entry, 5001, frame.clone()).is_err(), "too little");
        for at in 0..frame.len() {
            let mut bad = frame.clone();
            bad[at] ^= 0x40;
            // Some bits of a frame mean nothing; the content is right all the same.
            if let Ok(decoded) = decode(&entry, 5000, bad) {
                assert_eq!(decoded, content, "byte {at}");
            }
        }
    }

    #[test]
    fn a_bomb_is_not_decoded_beyond_the_chunk() {
        let (mut entry, frame) = zstd_entry(&vec![0; 64 << 20]);
        entry.sha256 = Sha256::digest(vec![0; 4096]).into();
        assert!(decode(&entry, 4096, frame).is_err());
    }
}
