//! The spawner, which mounted the filesystem: it hands out the connection to the kernel, and gets it back from here when it was restarted.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use wire::passing;
use wire::value::{Value, Writer};

use crate::device::Device;

const MAX_FRAME: u32 = 4 << 20;
/// A restart of the spawner takes some 100 ms.
const PAUSE: Duration = Duration::from_millis(50);

/// The connection to the kernel, for as long as the connection to the spawner is held.
pub struct Taken {
    pub stream: UnixStream,
    pub descriptor: OwnedFd,
}

fn request(verb: &str) -> Vec<u8> {
    Writer::new()
        .map(2)
        .text("id")
        .unsigned(1)
        .text("verb")
        .text(verb)
        .finish()
}

/// The answer to the one request, whatever events come before it.
fn reply(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    loop {
        let (body, descriptor) = passing::receive_frame(stream, MAX_FRAME)?
            .ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidData);
        let map = Value::read(&body).map_err(invalid)?;
        if map.get("id") != &Value::Unsigned(1) {
            continue;
        }
        if let Ok(message) = map.get("error").get("message").text() {
            return Err(io::Error::other(message));
        }
        return Ok(descriptor);
    }
}

/// Asks for the connection to the kernel.
pub fn take(socket: &Path) -> io::Result<Taken> {
    let stream = UnixStream::connect(socket)?;
    passing::send_frame(&stream, &request("fuse_take"), None)?;
    let descriptor = reply(&stream)?.ok_or_else(|| io::Error::other("no descriptor came"))?;
    Ok(Taken { stream, descriptor })
}

/// Holds the connection to the spawner; when it breaks, gives the descriptor to the next spawner. Returns why that one doesn't want it.
pub fn hold(mut stream: UnixStream, device: &Device, socket: &Path) -> io::Error {
    loop {
        while let Ok(Some(_)) = passing::receive_frame(&stream, MAX_FRAME) {}
        stream = loop {
            std::thread::sleep(PAUSE);
            let Ok(next) = UnixStream::connect(socket) else {
                continue;
            };
            let given = passing::send_frame(&next, &request("fuse_give"), Some(device.raw()))
                .and_then(|()| reply(&next));
            match given {
                Ok(_) => break next,
                Err(error) if error.kind() == io::ErrorKind::Other => return error,
                // That one has died as well.
                Err(_) => {}
            }
        };
    }
}
