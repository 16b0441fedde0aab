//! What is told unasked, to everybody who is connected to the control socket.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use wire::value::Writer;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Every chunk of the blob is here.
    Complete { blob: String },
    /// Reads of the blob got EIO.
    Failed { blob: String, reason: String },
    /// Chunks can't be kept.
    Uncached { reason: String },
}

impl Event {
    fn encode(&self) -> Vec<u8> {
        let (name, fields): (&str, Vec<(&str, &str)>) = match self {
            Event::Complete { blob } => ("complete", vec![("blob", blob)]),
            Event::Failed { blob, reason } => ("failed", vec![("blob", blob), ("reason", reason)]),
            Event::Uncached { reason } => ("uncached", vec![("reason", reason)]),
        };
        let out = Writer::new().map(fields.len() + 1).text("event").text(name);
        fields
            .into_iter()
            .fold(out, |out, (key, value)| out.text(key).text(value))
            .finish()
    }
}

/// A connection's writing half; frames come from several threads, each whole.
#[derive(Clone)]
pub struct Peer(Arc<Mutex<UnixStream>>);

impl Peer {
    pub fn new(stream: UnixStream) -> Self {
        Peer(Arc::new(Mutex::new(stream)))
    }

    /// A peer that doesn't take a frame in time is cut off: it asks again when it is back.
    pub fn send(&self, body: &[u8]) {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if wire::passing::send_frame(&*stream, body, None).is_err() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

#[derive(Default)]
pub struct Events(Mutex<Vec<Peer>>);

impl Events {
    pub fn tell(&self, event: &Event) {
        let body = event.encode();
        let peers = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        peers.iter().for_each(|peer| peer.send(&body));
    }

    pub fn add(&self, peer: &Peer) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(peer.clone());
    }

    pub fn remove(&self, peer: &Peer) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|one| !Arc::ptr_eq(&one.0, &peer.0));
    }
}
