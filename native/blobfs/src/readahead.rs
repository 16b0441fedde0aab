//! Recognizes readers that go through a blob piece by piece, and says what to have ahead of them. Pure.

use std::ops::Range;

/// Readers that are told apart in one blob.
const STREAMS: usize = 16;
/// The most bytes ahead of one reader: 70 ms of 1 Gbit/s.
const MOST_AHEAD: u32 = 8 << 20;

#[derive(Clone, Copy)]
struct Stream {
    /// The piece that it is in.
    at: u32,
    /// Pieces to have ahead: as many as it has gone on by. Who stops has had no more fetched in vain than was read.
    ahead: u32,
    /// The end of what was named for it: nothing is named twice.
    named: u32,
    /// Whether it has gone on to a piece that nobody had asked for.
    is_first: bool,
}

/// The readers of one blob.
pub struct Readers {
    /// The most recent one last.
    streams: Vec<Stream>,
    /// Pieces.
    most_ahead: u32,
}

impl Readers {
    /// Of a blob in pieces of so many bytes.
    pub fn of(piece_bytes: u32) -> Readers {
        Readers {
            streams: Vec::new(),
            most_ahead: (MOST_AHEAD / piece_bytes).max(1),
        }
    }

    /// A read of these pieces; returns those that its reader will want next, as far as they weren't named before (they may lie behind the blob's
    /// end). `is_first`: nobody had asked for one of them before. Nothing is named for a reader that finds whatever it reads asked for: it reads what
    /// was recorded or what others have read, and what lies behind that is not what it wants.
    pub fn reads(&mut self, first: u32, last: u32, is_first: bool) -> Range<u32> {
        let known = self
            .streams
            .iter()
            .position(|stream| first == stream.at || first == stream.at + 1);
        let mut stream = match known {
            Some(position) => self.streams.remove(position),
            None => Stream {
                at: first,
                ahead: 0,
                named: 0,
                is_first: false,
            },
        };
        let mut next = 0..0;
        if last > stream.at {
            stream.is_first |= is_first;
            stream.ahead = (stream.ahead + last - stream.at).min(self.most_ahead);
            stream.at = last;
            if stream.is_first {
                next = stream.named.max(last + 1)..last + 1 + stream.ahead;
                stream.named = next.end;
            }
        }
        if self.streams.len() == STREAMS {
            self.streams.remove(0);
        }
        self.streams.push(stream);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(readers: &mut Readers, first: u32, last: u32) -> Range<u32> {
        readers.reads(first, last, true)
    }

    #[test]
    fn a_reader_that_goes_on_gets_more_and_more_ahead() {
        let mut readers = Readers::of(1 << 20);
        assert!(next(&mut readers, 10, 10).is_empty());
        assert!(next(&mut readers, 10, 10).is_empty());
        assert_eq!(next(&mut readers, 11, 11), 12..13);
        assert!(next(&mut readers, 11, 11).is_empty());
        assert_eq!(next(&mut readers, 12, 12), 13..15);
        assert_eq!(next(&mut readers, 13, 14), 15..19);
        for chunk in 15..30 {
            next(&mut readers, chunk, chunk);
        }
        assert_eq!(next(&mut readers, 30, 30), 38..39);
    }

    #[test]
    fn small_chunks_are_as_many_bytes_ahead_as_large_ones() {
        for (chunk_bytes, most) in [(256 << 10, 32), (16 << 20, 1)] {
            let mut readers = Readers::of(chunk_bytes);
            for chunk in 0..100 {
                next(&mut readers, chunk, chunk);
            }
            assert_eq!(next(&mut readers, 100, 100), 100 + most..101 + most);
        }
    }

    #[test]
    fn a_reader_of_what_is_there_fetches_nothing_until_it_goes_beyond() {
        let mut readers = Readers::of(1 << 20);
        readers.reads(7, 7, true);
        assert!(readers.reads(8, 8, false).is_empty());
        assert!(readers.reads(9, 9, false).is_empty());
        assert_eq!(readers.reads(10, 10, true), 11..14);
        assert_eq!(
            readers.reads(11, 11, false),
            14..16,
            "what it has fetched itself"
        );
    }

    #[test]
    fn readers_are_told_apart_and_jumps_fetch_nothing() {
        let mut readers = Readers::of(1 << 20);
        for chunk in [5, 90, 40, 71, 12] {
            assert!(next(&mut readers, chunk, chunk).is_empty());
        }
        assert_eq!(next(&mut readers, 41, 41), 42..43);
        assert_eq!(next(&mut readers, 6, 6), 7..8);
    }

    #[test]
    fn the_readers_of_long_ago_are_forgotten() {
        let mut readers = Readers::of(1 << 20);
        for chunk in 0..1000 {
            next(&mut readers, 3 * chunk, 3 * chunk);
        }
        assert_eq!(readers.streams.len(), STREAMS);
        assert!(next(&mut readers, 1, 1).is_empty());
    }
}
