//! Recognizes readers that go through a blob chunk by chunk, and says what to fetch ahead of them. Pure.

use std::ops::Range;

/// Readers that are told apart in one blob.
const STREAMS: usize = 16;
/// The most chunks ahead of one reader.
const MOST_AHEAD: u32 = 8;

#[derive(Clone, Copy)]
struct Stream {
    /// The chunk that it is in.
    at: u32,
    /// Chunks to have ahead; 0 until it has gone on from one chunk to the next.
    ahead: u32,
    /// The end of what was named for it: nothing is named twice.
    named: u32,
}

/// The readers of one blob, the most recent one last.
#[derive(Default)]
pub struct Readers(Vec<Stream>);

impl Readers {
    /// A read of these chunks; returns those that its reader will want next, as far as they weren't named before (they may lie behind the blob's
    /// end).
    pub fn reads(&mut self, first: u32, last: u32) -> Range<u32> {
        let known = self
            .0
            .iter()
            .position(|stream| first == stream.at || first == stream.at + 1);
        let mut stream = match known {
            Some(position) => self.0.remove(position),
            None => Stream {
                at: first,
                ahead: 0,
                named: 0,
            },
        };
        let mut next = 0..0;
        if last > stream.at {
            stream.ahead = (2 * stream.ahead).clamp(1, MOST_AHEAD);
            stream.at = last;
            next = stream.named.max(last + 1)..last + 1 + stream.ahead;
            stream.named = next.end;
        }
        if self.0.len() == STREAMS {
            self.0.remove(0);
        }
        self.0.push(stream);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_goes_on_gets_more_and_more_ahead() {
        let mut readers = Readers::default();
        assert!(readers.reads(10, 10).is_empty());
        assert!(readers.reads(10, 10).is_empty());
        assert_eq!(readers.reads(11, 11), 12..13);
        assert!(readers.reads(11, 11).is_empty());
        assert_eq!(readers.reads(12, 12), 13..15);
        assert_eq!(readers.reads(13, 14), 15..19);
        for chunk in 15..30 {
            readers.reads(chunk, chunk);
        }
        assert_eq!(readers.reads(30, 30), 30 + MOST_AHEAD..31 + MOST_AHEAD);
    }

    #[test]
    fn readers_are_told_apart_and_jumps_fetch_nothing() {
        let mut readers = Readers::default();
        for chunk in [5, 90, 40, 71, 12] {
            assert!(readers.reads(chunk, chunk).is_empty());
        }
        assert_eq!(readers.reads(41, 41), 42..43);
        assert_eq!(readers.reads(6, 6), 7..8);
    }

    #[test]
    fn the_readers_of_long_ago_are_forgotten() {
        let mut readers = Readers::default();
        for chunk in 0..1000 {
            readers.reads(3 * chunk, 3 * chunk);
        }
        assert_eq!(readers.0.len(), STREAMS);
        assert!(readers.reads(1, 1).is_empty());
    }
}
