//! The control socket: what the service asks for, each request parsed strictly.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use wire::passing;
use wire::value::{Mismatch, Value, Writer};

use crate::blobs::{Blobs, Refusal, Totals};
use crate::events::{Events, Peer};

/// The largest chunk table and what is around it.
const MAX_REQUEST: u32 = 64 << 20;
/// A peer that takes nothing for so long is cut off.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq, Eq)]
enum Verb {
    Register { blob: String, index: Vec<u8> },
    Forget { blob: String },
    Prefetch { blob: String, chunks: Vec<u32> },
    TraceStart { blob: String },
    TraceTake { blob: String },
    Seal { blob: String },
    Stats { blobs: Option<Vec<String>> },
    Reads { sandbox: String },
}

/// The name of the argument that is missing or not allowed.
#[derive(Debug, PartialEq, Eq)]
struct Bad(&'static str);

fn argument<T>(name: &'static str, value: Result<T, Mismatch>) -> Result<T, Bad> {
    value.map_err(|_| Bad(name))
}

fn texts(value: &Value) -> Result<Vec<String>, Mismatch> {
    value.array()?.iter().map(Value::text).collect()
}

fn verb(map: &Value) -> Result<Verb, Bad> {
    let blob = || argument("blob", map.get("blob").text());
    Ok(match argument("verb", map.get("verb").text())?.as_str() {
        "register" => Verb::Register {
            blob: blob()?,
            index: argument("index", map.get("index").bytes())?,
        },
        "forget" => Verb::Forget { blob: blob()? },
        "prefetch" => {
            // There is one priority yet; others must not be taken for it.
            if !matches!(map.get("priority"), Value::Nil | Value::Bytes(b"low")) {
                return Err(Bad("priority"));
            }
            let chunks = argument("chunks", map.get("chunks").array())?;
            Verb::Prefetch {
                blob: blob()?,
                chunks: argument("chunks", chunks.iter().map(Value::unsigned).collect())?,
            }
        }
        "trace_start" => Verb::TraceStart { blob: blob()? },
        "trace_take" => Verb::TraceTake { blob: blob()? },
        "seal" => Verb::Seal { blob: blob()? },
        "stats" => Verb::Stats {
            blobs: argument("blobs", map.get("blobs").optional(texts))?,
        },
        "reads" => Verb::Reads {
            sandbox: argument("sandbox", map.get("sandbox").text())?,
        },
        _ => return Err(Bad("verb")),
    })
}

fn answer(id: u64, count: usize) -> Writer {
    Writer::new().map(count + 1).text("id").unsigned(id)
}

fn refusal(id: u64, refused: &Refusal) -> Vec<u8> {
    answer(id, 1)
        .text("error")
        .map(2)
        .text("code")
        .text(refused.0)
        .text("message")
        .text(&refused.1)
        .finish()
}

fn trace(id: u64, touches: &[(u32, u32)]) -> Vec<u8> {
    touches
        .iter()
        .fold(
            answer(id, 1).text("chunks").array(touches.len()),
            |out, (chunk, elapsed)| {
                out.array(2)
                    .unsigned((*chunk).into())
                    .unsigned((*elapsed).into())
            },
        )
        .finish()
}

fn stats(id: u64, totals: &Totals) -> Vec<u8> {
    let out = answer(id, 4)
        .text("cache_bytes")
        .unsigned(totals.cache_bytes)
        .text("cache_used")
        .unsigned(totals.cache_used)
        .text("connected")
        .boolean(totals.connected)
        .text("blobs")
        .map(totals.blobs.len());
    totals
        .blobs
        .iter()
        .fold(out, |out, blob| {
            out.text(&blob.hex)
                .map(5)
                .text("size")
                .unsigned(blob.size)
                .text("needed")
                .unsigned(blob.needed)
                .text("fetched")
                .unsigned(blob.fetched)
                .text("from_cache")
                .unsigned(blob.from_cache)
                .text("complete")
                .boolean(blob.complete)
        })
        .finish()
}

fn carry_out(blobs: &Blobs, id: u64, verb: Verb) -> Result<Vec<u8>, Refusal> {
    let done = |()| answer(id, 0).finish();
    match verb {
        Verb::Register { blob, index } => blobs.register(&blob, &index).map(done),
        Verb::Forget { blob } => blobs.forget(&blob).map(done),
        Verb::Prefetch { blob, chunks } => blobs.prefetch(&blob, &chunks).map(done),
        Verb::TraceStart { blob } => blobs.trace_start(&blob).map(done),
        Verb::TraceTake { blob } => Ok(trace(id, &blobs.trace_take(&blob)?)),
        Verb::Seal { blob } => blobs.seal(&blob).map(done),
        Verb::Reads { sandbox } => {
            let reads = blobs.reads_of(&sandbox);
            let out = answer(id, 3).text("needed").unsigned(reads.needed);
            let out = out.text("fetched").unsigned(reads.fetched);
            Ok(out.text("from_cache").unsigned(reads.from_cache).finish())
        }
        Verb::Stats { blobs: wanted } => Ok(stats(id, &blobs.stats(wanted.as_deref()))),
    }
}

fn reply(blobs: &Blobs, body: &[u8]) -> Vec<u8> {
    let Ok(map) = Value::read(body) else {
        return refusal(0, &refused(&Bad("request")));
    };
    let id = map.get("id").unsigned().unwrap_or(0);
    verb(&map)
        .map_err(|bad| refused(&bad))
        .and_then(|verb| carry_out(blobs, id, verb))
        .unwrap_or_else(|refused| refusal(id, &refused))
}

fn refused(Bad(name): &Bad) -> Refusal {
    Refusal(
        "invalid_argument",
        format!("{name} is missing or not allowed"),
    )
}

/// Binds the socket, in the place of an earlier process's. Nobody but this user can connect.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves whoever connects, forever; a thread each.
pub fn run(blobs: &Arc<Blobs>, events: &Arc<Events>, listener: &UnixListener) {
    for stream in listener.incoming().flatten() {
        if !is_allowed(&stream) || stream.set_write_timeout(Some(PATIENCE)).is_err() {
            continue;
        }
        let (blobs, events) = (blobs.clone(), events.clone());
        let started = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || serve(&blobs, &events, &stream));
        if let Err(error) = started {
            eprintln!("dsec-blobfs: a thread for a control connection: {error}");
        }
    }
}

fn serve(blobs: &Blobs, events: &Events, stream: &UnixStream) {
    let Ok(writing) = stream.try_clone() else {
        return;
    };
    let peer = Peer::new(writing);
    events.add(&peer);
    while let Ok(Some((body, _))) = passing::receive_frame(stream, MAX_REQUEST) {
        peer.send(&reply(blobs, &body));
    }
    events.remove(&peer);
}

/// Only this user, and root, for whom nothing is closed.
fn is_allowed(stream: &UnixStream) -> bool {
    // SAFETY: ucred is plain data of the length given.
    unsafe {
        let mut credentials: libc::ucred = std::mem::zeroed();
        let mut length = std::mem::size_of::<libc::ucred>() as libc::socklen_t;
        let result = libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut length,
        );
        result == 0 && (credentials.uid == 0 || credentials.uid == libc::geteuid())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(write: impl Fn(Writer) -> Writer) -> Result<Verb, Bad> {
        let body = write(Writer::new()).finish();
        verb(&Value::read(&body).unwrap())
    }

    #[test]
    fn requests_are_understood_whole_or_not_at_all() {
        let blob = "a".repeat(64);
        let prefetch = |priority: &'static str| {
            parsed(|out| {
                let out = out.map(4).text("verb").text("prefetch");
                let out = out.text("blob").text(&blob).text("chunks").array(1);
                out.unsigned(3).text("priority").text(priority)
            })
        };
        let wanted = Verb::Prefetch {
            blob: blob.clone(),
            chunks: vec![3],
        };
        assert_eq!(prefetch("low"), Ok(wanted));
        assert_eq!(prefetch("high"), Err(Bad("priority")));
        let stats = parsed(|out| out.map(2).text("verb").text("stats").text("blobs").nil());
        assert_eq!(stats, Ok(Verb::Stats { blobs: None }));
    }

    #[test]
    fn what_is_missing_is_named() {
        let bare = |name: &'static str| parsed(|out| out.map(1).text("verb").text(name));
        assert_eq!(bare("register"), Err(Bad("blob")));
        assert_eq!(bare("dance"), Err(Bad("verb")));
        let index = parsed(|out| {
            let out = out.map(3).text("verb").text("register");
            out.text("blob").text("x").text("index").unsigned(1)
        });
        assert_eq!(index, Err(Bad("index")));
    }
}
