//! Frames: a big-endian u32 length, then a msgpack array `[stream u32, kind u8, arg u64, payload bin]`.
//!
//! Writers always use the widest form of each field, so that a header has one size ([`HEADER_LEN`]) and can be filled in beside a payload
//! that stays where it is. Readers take every form that msgpack allows.

use std::fmt;

/// The most that a frame may carry: a command line of 1 MiB in one-byte arguments takes three times that much.
pub const MAX_PAYLOAD: usize = 4 << 20;
/// The most that the length of a frame may say: a payload and its header.
pub const MAX_FRAME: usize = MAX_PAYLOAD + 64;
/// Bytes of a header as [`header`] writes it, the length prefix included.
pub const HEADER_LEN: usize = 25;
/// Version that HELLO announces.
pub const PROTOCOL_VERSION: u64 = 1;

/// Frame kinds, by direction: below 32 to chronus, from 32 on to the edge.
pub mod kind {
    pub const START: u8 = 1;
    pub const STDIN: u8 = 2;
    pub const STDIN_EOF: u8 = 3;
    pub const CREDIT: u8 = 4;
    pub const SIGNAL: u8 = 5;
    pub const RESIZE: u8 = 6;
    pub const ATTACH: u8 = 7;
    pub const DETACH: u8 = 8;
    pub const LIST: u8 = 9;
    pub const SHELL: u8 = 10;
    pub const CLOSE_SESSION: u8 = 11;
    pub const CONNECT: u8 = 12;
    pub const PING: u8 = 13;
    pub const HELLO: u8 = 32;
    pub const STARTED: u8 = 33;
    pub const STDOUT: u8 = 34;
    pub const STDERR: u8 = 35;
    pub const STDIN_CREDIT: u8 = 36;
    pub const EXIT: u8 = 37;
    pub const ERROR: u8 = 38;
    pub const LISTING: u8 = 39;
    pub const PONG: u8 = 40;
}

/// One frame; the payload points into the buffer that it was parsed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub stream: u32,
    pub kind: u8,
    pub arg: u64,
    pub payload: &'a [u8],
}

/// The bytes are not a frame: the connection that they came from can't be understood any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// The length prefix exceeds [`MAX_FRAME`].
    Length(u32),
    /// The length is fine, what follows is not the array described above.
    Array,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::Length(length) => write!(f, "a frame of {length} bytes exceeds {MAX_FRAME}"),
            Malformed::Array => f.write_str("not a frame array"),
        }
    }
}

impl std::error::Error for Malformed {}

/// The bytes that come before a payload of `payload_len` bytes (at most [`MAX_PAYLOAD`]).
pub fn header(stream: u32, kind: u8, arg: u64, payload_len: usize) -> [u8; HEADER_LEN] {
    debug_assert!(payload_len <= MAX_PAYLOAD && kind < 0x80);
    let mut out = [0; HEADER_LEN];
    out[..4].copy_from_slice(&((HEADER_LEN - 4 + payload_len) as u32).to_be_bytes());
    out[4] = 0x94;
    out[5] = 0xce;
    out[6..10].copy_from_slice(&stream.to_be_bytes());
    out[10] = kind;
    out[11] = 0xcf;
    out[12..20].copy_from_slice(&arg.to_be_bytes());
    out[20] = 0xc6;
    out[21..25].copy_from_slice(&(payload_len as u32).to_be_bytes());
    out
}

/// The first frame of `buffer` and the bytes that it takes up; None while it is incomplete.
pub fn split(buffer: &[u8]) -> Result<Option<(Frame<'_>, usize)>, Malformed> {
    let Some(needed) = needed(buffer)? else {
        return Ok(None);
    };
    if buffer.len() < needed {
        return Ok(None);
    }
    Ok(Some((parse(&buffer[4..needed])?, needed)))
}

/// How many bytes the first frame of `buffer` takes up, its prefix included; None while even the prefix is incomplete.
pub fn needed(buffer: &[u8]) -> Result<Option<usize>, Malformed> {
    let Some(prefix) = buffer.first_chunk::<4>() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes(*prefix);
    if length as usize > MAX_FRAME {
        return Err(Malformed::Length(length));
    }
    Ok(Some(4 + length as usize))
}

fn parse(mut body: &[u8]) -> Result<Frame<'_>, Malformed> {
    let array = |_| Malformed::Array;
    if rmp::decode::read_array_len(&mut body).map_err(|_| Malformed::Array)? != 4 {
        return Err(Malformed::Array);
    }
    let stream = rmp::decode::read_int(&mut body).map_err(array)?;
    let kind = rmp::decode::read_int(&mut body).map_err(array)?;
    let arg = rmp::decode::read_int(&mut body).map_err(array)?;
    let length = rmp::decode::read_bin_len(&mut body).map_err(|_| Malformed::Array)?;
    if body.len() != length as usize {
        return Err(Malformed::Array);
    }
    Ok(Frame {
        stream,
        kind,
        arg,
        payload: body,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(stream: u32, kind: u8, arg: u64, payload: &[u8]) -> Vec<u8> {
        let mut out = header(stream, kind, arg, payload.len()).to_vec();
        out.extend_from_slice(payload);
        out
    }

    #[test]
    fn a_frame_survives_the_round_trip() {
        let data = bytes(7, kind::STDOUT, u64::MAX, b"\xff\x00payload");
        let (frame, used) = split(&data).unwrap().unwrap();
        assert_eq!(
            frame,
            Frame {
                stream: 7,
                kind: kind::STDOUT,
                arg: u64::MAX,
                payload: b"\xff\x00payload"
            }
        );
        assert_eq!(used, data.len());
    }

    #[test]
    fn every_prefix_of_a_frame_is_incomplete_not_malformed() {
        let data = bytes(1, kind::STDIN, 0, b"abc");
        for end in 0..data.len() {
            assert_eq!(split(&data[..end]), Ok(None), "at {end}");
        }
    }

    #[test]
    fn short_forms_are_read() {
        let mut body = Vec::new();
        rmp::encode::write_array_len(&mut body, 4).unwrap();
        rmp::encode::write_uint(&mut body, 3).unwrap();
        rmp::encode::write_uint(&mut body, u64::from(kind::PING)).unwrap();
        rmp::encode::write_uint(&mut body, 300).unwrap();
        rmp::encode::write_bin(&mut body, b"x").unwrap();
        let mut data = (body.len() as u32).to_be_bytes().to_vec();
        data.extend(body);
        let (frame, _) = split(&data).unwrap().unwrap();
        assert_eq!(
            frame,
            Frame {
                stream: 3,
                kind: kind::PING,
                arg: 300,
                payload: b"x"
            }
        );
    }

    #[test]
    fn the_largest_payload_fits_and_one_byte_more_does_not() {
        let largest = bytes(1, kind::STDIN, 0, &vec![1; MAX_PAYLOAD]);
        assert!(split(&largest).unwrap().is_some());
        let excess = (MAX_FRAME as u32 + 1).to_be_bytes();
        assert_eq!(split(&excess), Err(Malformed::Length(MAX_FRAME as u32 + 1)));
    }

    #[test]
    fn garbage_is_malformed() {
        for body in [
            &b"\xc0"[..],
            b"\x93\x01\x01\x01",
            b"\x94\x01\x01\x01\xc4\x05ab",
            b"\x94\x01\x01\x01\xc4\x01ab",
            b"\x94\xff\x01\x01\xc4\x00",
            b"",
        ] {
            let mut data = (body.len() as u32).to_be_bytes().to_vec();
            data.extend_from_slice(body);
            assert_eq!(split(&data), Err(Malformed::Array), "{body:?}");
        }
    }
}
