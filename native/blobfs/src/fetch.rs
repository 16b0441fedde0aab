//! The connection to the fetcher, which brings ranges of the store's objects. It comes back by itself.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use wire::passing;
use wire::value::{Mismatch, Value, Writer};

use crate::blobs::Blobs;

/// A frame of the largest chunk, and what is around it.
const MAX_ANSWER: u32 = (16 << 20) + (1 << 20);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Why the store doesn't give a range, and whether asking again may help.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    pub reason: String,
    pub retry: bool,
}

pub fn request(id: u64, blob: &str, offset: u64, length: u32) -> Vec<u8> {
    Writer::new()
        .map(4)
        .text("id")
        .unsigned(id)
        .text("blob")
        .text(blob)
        .text("offset")
        .unsigned(offset)
        .text("length")
        .unsigned(length.into())
        .finish()
}

fn answer(body: &[u8]) -> Result<(u64, Result<Vec<u8>, Failure>), Mismatch> {
    let map = Value::read(body)?;
    let id = map.get("id").unsigned()?;
    Ok(match map.get("error") {
        Value::Nil => (id, Ok(map.get("data").bytes()?)),
        reason => (
            id,
            Err(Failure {
                reason: reason.text()?,
                retry: map.get("retry").boolean()?,
            }),
        ),
    })
}

/// Keeps a connection, forever.
pub fn run(blobs: &Blobs, socket: &Path) {
    let mut pause = FIRST_PAUSE;
    loop {
        if let Ok(stream) = UnixStream::connect(socket) {
            if converse(blobs, &stream) {
                pause = FIRST_PAUSE;
            }
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Until the connection breaks. Returns whether there was any answer on it.
fn converse(blobs: &Blobs, stream: &UnixStream) -> bool {
    let Ok(writing) = stream.try_clone() else {
        return false;
    };
    blobs.link_up(writing);
    let mut answers = 0_u64;
    while let Ok(Some((body, _))) = passing::receive_frame(stream, MAX_ANSWER) {
        let Ok((id, result)) = answer(&body) else {
            eprintln!("dsec-blobfs: the fetcher sent what is no answer; connecting again");
            break;
        };
        answers += 1;
        blobs.answered(id, result);
    }
    blobs.link_lost();
    answers > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_data_or_a_reason() {
        let data = Writer::new().map(2).text("id").unsigned(7);
        let data = data.text("data").bytes(b"xyz").finish();
        assert_eq!(answer(&data), Ok((7, Ok(b"xyz".to_vec()))));
        let error = Writer::new().map(3).text("id").unsigned(8);
        let error = error.text("error").text("gone").text("retry").boolean(true);
        let failure = Failure {
            reason: "gone".to_owned(),
            retry: true,
        };
        assert_eq!(answer(&error.finish()), Ok((8, Err(failure))));
    }

    #[test]
    fn what_is_neither_is_no_answer() {
        let no_data = Writer::new().map(1).text("id").unsigned(7).finish();
        let no_retry = Writer::new().map(2).text("id").unsigned(7);
        let no_retry = no_retry.text("error").text("gone").finish();
        for body in [&b""[..], b"\x80", &no_data, &no_retry] {
            assert!(answer(body).is_err());
        }
    }
}
