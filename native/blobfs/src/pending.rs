//! One read of the kernel's that waits for chunks.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::device::Device;

pub struct Pending {
    device: Arc<Device>,
    unique: u64,
    /// Of the range that was asked for, in the blob.
    start: u64,
    length: usize,
    pub deadline: Instant,
    parts: Mutex<Parts>,
}

struct Parts {
    /// Empty until a part comes that isn't all.
    buffer: Vec<u8>,
    /// Bytes that are still to come; 0: it is answered.
    left: usize,
}

impl Pending {
    pub fn new(
        device: Arc<Device>,
        unique: u64,
        start: u64,
        length: usize,
        deadline: Instant,
    ) -> Self {
        Pending {
            device,
            unique,
            start,
            length,
            deadline,
            parts: Mutex::new(Parts {
                buffer: Vec::new(),
                left: length,
            }),
        }
    }

    /// What the blob has at `at`, of which this read may want a part that it hasn't got yet. The last part answers it.
    pub fn supply(&self, at: u64, content: &[u8]) {
        let from = self.start.max(at);
        let to = (self.start + self.length as u64).min(at + content.len() as u64);
        if from >= to {
            return;
        }
        let part = &content[(from - at) as usize..(to - at) as usize];
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if parts.left < part.len() {
            return;
        }
        if part.len() == self.length {
            parts.left = 0;
            return self.device.reply(self.unique, part);
        }
        if parts.buffer.is_empty() {
            parts.buffer = vec![0; self.length];
        }
        let place = (from - self.start) as usize;
        parts.buffer[place..place + part.len()].copy_from_slice(part);
        parts.left -= part.len();
        if parts.left == 0 {
            self.device
                .reply(self.unique, &std::mem::take(&mut parts.buffer));
        }
    }

    /// Answers with EIO, unless it is answered.
    pub fn fail(&self) {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if parts.left > 0 {
            parts.left = 0;
            self.device.refuse(self.unique, libc::EIO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn pending(start: u64, length: usize) -> (Pending, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        let device = Arc::new(Device::new(here.into()));
        there.set_nonblocking(true).unwrap();
        (
            Pending::new(device, 9, start, length, Instant::now()),
            there,
        )
    }

    fn answer(stream: &mut UnixStream) -> Option<Vec<u8>> {
        let mut buffer = [0; 256];
        let read = stream.read(&mut buffer).ok()?;
        Some(buffer[16..read].to_vec())
    }

    #[test]
    fn one_part_that_holds_it_all_answers_at_once() {
        let (pending, mut kernel) = pending(10, 4);
        pending.supply(8, b"abcdefgh");
        assert_eq!(answer(&mut kernel).as_deref(), Some(&b"cdef"[..]));
        pending.supply(8, b"abcdefgh");
        pending.fail();
        assert_eq!(answer(&mut kernel), None);
    }

    #[test]
    fn parts_in_any_order_answer_when_all_are_there() {
        let (pending, mut kernel) = pending(2, 8);
        pending.supply(8, b"ijkl");
        pending.supply(0, b"abcd");
        assert_eq!(answer(&mut kernel), None);
        pending.supply(4, b"efgh");
        assert_eq!(answer(&mut kernel).as_deref(), Some(&b"cdefghij"[..]));
    }

    #[test]
    fn it_fails_once() {
        let (pending, mut kernel) = pending(0, 8);
        pending.supply(0, b"abcd");
        pending.fail();
        assert_eq!(answer(&mut kernel), Some(Vec::new()));
        pending.supply(4, b"efgh");
        pending.fail();
        assert_eq!(answer(&mut kernel), None);
    }
}
