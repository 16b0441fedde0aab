//! All blobs of the node: what is kept of each, who reads it, and what is on its way.
//!
//! One lock guards the tables; files are read and written, and frames decoded, outside of it. Chunks are given up (their holes punched) under it, so that
//! nobody takes them for present meanwhile. A chunk that is read is pinned, so that it isn't given up under the reader; a chunk that is written is in
//! flight, so that nobody else writes it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{mpsc, Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wire::digest::is_digest;

use crate::cache::{CacheFile, Directory};
use crate::chunk;
use crate::device::{Attributes, Device, Range, Request};
use crate::events::{Event, Events};
use crate::fetch;
use crate::flights::{Flights, Neighbours, Priority};
use crate::lru::Lru;
use crate::pending::Pending;
use crate::readahead::Readers;
use crate::table::{Invalid, Kind, Table};
use crate::who::{Name, Who};

/// What is counted as needed by readers: pages.
const BLOCK: u64 = 4096;
/// What a reader of the cache is recognized by, and what is read ahead for it at least: a disk takes hardly longer for that much than for a chunk.
const DISK_PIECE: u32 = 1 << 20;
/// Bytes of chunks that couldn't be kept and are held in memory for their next readers: a chunk is read in pieces. At least one chunk is.
const RECENT: usize = 8 << 20;
/// Sandboxes whose reads are counted; with one more the half that has read nothing for longest is forgotten.
const SANDBOXES_MAX: usize = 32_768;
/// A blob's failures are told at most this often: every reader would tell the same.
const FAILURES_EVERY: Duration = Duration::from_secs(1);
/// That chunks can't be kept is told at most this often: on a disk that is nearly full every other one fits.
const FULL_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    pub node: u64,
    pub chunk: u32,
}

impl Neighbours for Key {
    fn before(self) -> Option<Self> {
        let chunk = self.chunk.checked_sub(1)?;
        Some(Key { chunk, ..self })
    }

    fn after(self) -> Option<Self> {
        let chunk = self.chunk.checked_add(1)?;
        Some(Key { chunk, ..self })
    }
}

/// What is to be done with a chunk outside the lock.
pub enum Job {
    /// See whether what an earlier process kept of it is right.
    Check { key: Key, serial: u64 },
    /// Its frame is here.
    Landed {
        key: Key,
        serial: u64,
        frame: Vec<u8>,
    },
}

/// What the control socket is answered when a verb can't be carried out: a code of `docs/wire.md` and a message.
#[derive(Debug)]
pub struct Refusal(pub &'static str, pub String);

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        let code = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "no_space",
            _ => "failed",
        };
        Refusal(code, error.to_string())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Absent,
    /// There is something in the file, which nobody has checked yet.
    Kept,
    /// Checked by this process.
    Present,
    /// Needs neither store nor space.
    Zeros,
}

struct Trace {
    since: Instant,
    seen: HashSet<u32>,
    touches: Vec<(u32, u32)>,
}

struct Blob {
    hex: String,
    table: Arc<Table>,
    file: Arc<CacheFile>,
    chunks: Vec<Chunk>,
    /// Chunks that are Present or Zeros.
    whole: u32,
    /// Chunks that are Kept.
    kept: u32,
    /// Somebody relies on the file as a whole: it is never given up in part, and no longer the cache's.
    sealed: bool,
    /// While it is being forgotten, nobody finds it.
    leaving: bool,
    /// Of what is fetched ahead from the store, in chunks.
    readers: Readers,
    /// Of what is read ahead from the disk.
    disk_readers: Readers,
    trace: Option<Trace>,
    /// A bit for each page that was ever read.
    pages: Vec<u64>,
    needed: u64,
    fetched: u64,
    from_cache: u64,
    failed_at: Option<Instant>,
}

impl Blob {
    fn is_complete(&self) -> bool {
        self.whole == self.table.count()
    }

    /// Where the reader of a range that is all here will go on: offset and length, 0 if nobody knows.
    fn next_on_disk(&mut self, offset: u64, length: u64) -> (u64, u64) {
        let piece = u64::from(DISK_PIECE);
        let at = |byte: u64| u32::try_from(byte / piece).unwrap_or(u32::MAX);
        let next = self
            .disk_readers
            .reads(at(offset), at(offset + length - 1), true);
        (u64::from(next.start) * piece, next.len() as u64 * piece)
    }

    /// Takes note of a read.
    fn note(&mut self, offset: u64, length: u64, now: Instant) {
        let size = self.table.size;
        for page in offset / BLOCK..=(offset + length - 1) / BLOCK {
            let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
            if self.pages[word] & bit == 0 {
                self.pages[word] |= bit;
                self.needed += BLOCK.min(size - page * BLOCK);
            }
        }
        if let Some(trace) = &mut self.trace {
            let elapsed = now.saturating_duration_since(trace.since).as_millis();
            for chunk in self.table.chunks_of(offset, length) {
                if trace.seen.insert(chunk) {
                    trace
                        .touches
                        .push((chunk, elapsed.try_into().unwrap_or(u32::MAX)));
                }
            }
        }
    }
}

struct State {
    blobs: HashMap<u64, Blob>,
    flights: Flights<Key, Arc<Pending>>,
    /// The chunks that take space and may be given up.
    lru: Lru<Key>,
    /// Bytes of those, and of what is being written.
    used: u64,
    pins: HashMap<Key, u32>,
    recent: VecDeque<(Key, Arc<Vec<u8>>)>,
    link: Option<UnixStream>,
    /// When it was last told that chunks can't be kept.
    said_full: Option<Instant>,
    sandboxes: HashMap<Name, Reads>,
    /// Reads of all sandboxes so far.
    reads: u64,
}

/// What a sandbox has read of all blobs; bytes.
#[derive(Clone, Copy, Default)]
pub struct Reads {
    /// What it asked for: what is in the kernel's memory already it gets without asking.
    pub needed: u64,
    /// Frames that it was the first to ask for.
    pub fetched: u64,
    /// Reads that waited for nothing.
    pub from_cache: u64,
    /// The number of its last read among all of the node.
    last: u64,
}

/// Figures of one blob; bytes.
pub struct Figures {
    pub hex: String,
    pub size: u64,
    /// Distinct pages that were read.
    pub needed: u64,
    /// Bytes of frames that came from the store.
    pub fetched: u64,
    /// Bytes of reads that waited for nothing.
    pub from_cache: u64,
    pub complete: bool,
}

/// Figures of the node; bytes.
pub struct Totals {
    pub cache_bytes: u64,
    pub cache_used: u64,
    pub connected: bool,
    pub blobs: Vec<Figures>,
}

pub struct Blobs {
    state: Mutex<State>,
    /// Something is in flight.
    busy: Condvar,
    device: Arc<Device>,
    directory: Directory,
    bound: u64,
    patience: Duration,
    jobs: mpsc::Sender<Job>,
    events: Arc<Events>,
    /// Held while a blob comes or goes: both take several steps.
    changing: Mutex<()>,
    who: Who,
}

/// The number of a blob's inode: the same in every process, since the kernel keeps it over restarts. None for what is no digest.
fn node_of(hex: &str) -> Option<u64> {
    if !is_digest(hex) {
        return None;
    }
    // 0 and 1 mean something else to FUSE.
    u64::from_str_radix(&hex[..16], 16)
        .ok()
        .map(|node| node.max(2))
}

/// What becomes of a read.
enum Plan {
    /// It is answered.
    Done,
    /// Everything is in the file; the chunks are pinned.
    Ready {
        file: Arc<CacheFile>,
        length: usize,
        pinned: Vec<Key>,
        /// Where its reader will go on: offset and length.
        next: (u64, u64),
    },
    /// Some of it is on its way; these parts are in the file, and pinned.
    Partly {
        pending: Arc<Pending>,
        file: Arc<CacheFile>,
        parts: Vec<(Key, u64, u32)>,
        recent: Vec<(u64, Arc<Vec<u8>>)>,
    },
}

impl State {
    /// Where the reads of a sandbox are counted.
    fn reads_of(&mut self, sandbox: Name) -> &mut Reads {
        if self.sandboxes.len() >= SANDBOXES_MAX && !self.sandboxes.contains_key(&sandbox) {
            let mut last: Vec<u64> = self.sandboxes.values().map(|reads| reads.last).collect();
            let middle = last.len() / 2;
            let middle = *last.select_nth_unstable(middle).1;
            self.sandboxes.retain(|_, reads| reads.last > middle);
        }
        self.reads += 1;
        let reads = self.sandboxes.entry(sandbox).or_default();
        reads.last = self.reads;
        reads
    }

    fn pin(&mut self, key: Key) {
        *self.pins.entry(key).or_insert(0) += 1;
    }

    fn unpin(&mut self, key: Key) {
        if let Some(count) = self.pins.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.pins.remove(&key);
            }
        }
    }

    fn find(&mut self, hex: &str) -> Result<(u64, &mut Blob), Refusal> {
        let unknown = || Refusal("not_found", format!("blob {hex} is not registered"));
        let node = node_of(hex).ok_or_else(unknown)?;
        let blob = self.blobs.get_mut(&node).ok_or_else(unknown)?;
        if blob.hex == hex {
            Ok((node, blob))
        } else {
            Err(unknown())
        }
    }

    /// The event that says why readers of a blob got EIO, unless one was told just now.
    fn failure(&mut self, key: Key, reason: &str) -> Option<Event> {
        let blob = self.blobs.get_mut(&key.node)?;
        let now = Instant::now();
        if blob
            .failed_at
            .is_some_and(|last| now.saturating_duration_since(last) < FAILURES_EVERY)
        {
            return None;
        }
        blob.failed_at = Some(now);
        Some(Event::Failed {
            blob: blob.hex.clone(),
            reason: reason.to_owned(),
        })
    }

    /// The cache's disk failed at these chunks: they are checked, or fetched, before they are used again.
    fn doubt(&mut self, keys: &[Key], error: &io::Error) {
        for key in keys {
            let Some(blob) = self.blobs.get_mut(&key.node) else {
                continue;
            };
            eprintln!(
                "dsec-blobfs: reading chunk {} of {}: {error}",
                key.chunk, blob.hex
            );
            let state = &mut blob.chunks[key.chunk as usize];
            if *state == Chunk::Present {
                *state = Chunk::Kept;
                blob.whole -= 1;
                blob.kept += 1;
            }
        }
    }

    fn recent(&self, key: Key) -> Option<Arc<Vec<u8>>> {
        let found = self.recent.iter().find(|(known, _)| *known == key)?;
        Some(found.1.clone())
    }

    /// Makes a chunk be on its way that isn't there. Returns the job that has to be done first, if there is one.
    fn want(&mut self, key: Key, priority: Priority, waiter: Option<Arc<Pending>>) -> Option<Job> {
        let state = *self.blobs.get(&key.node)?.chunks.get(key.chunk as usize)?;
        if matches!(state, Chunk::Present | Chunk::Zeros) {
            return None;
        }
        let Err(waiter) = self.flights.join(key, priority, waiter) else {
            return None;
        };
        let serial = self.flights.start(key, priority, waiter);
        if state == Chunk::Kept {
            // It must not be given up between the look at it and the verdict.
            self.pin(key);
            return Some(Job::Check { key, serial });
        }
        self.flights.enqueue(key);
        None
    }

    /// The frames of neighbouring chunks, taken apart: a job for each chunk that is waited for.
    fn landed(&mut self, run: &[(Key, Option<u64>)], mut frames: Vec<u8>) -> Vec<Job> {
        let mut jobs = Vec::with_capacity(run.len());
        // From the end: the first one keeps the memory.
        for (key, serial) in run.iter().rev() {
            let Some(blob) = self.blobs.get_mut(&key.node) else {
                return Vec::new();
            };
            let length = blob.table.entries[key.chunk as usize].length as usize;
            // An answer of another length than asked for leaves some frame too short or too long, which its check will find.
            let frame = if *key == run[0].0 {
                std::mem::take(&mut frames)
            } else {
                frames.split_off(frames.len().saturating_sub(length))
            };
            if let Some(serial) = *serial {
                blob.fetched += frame.len() as u64;
                let key = *key;
                jobs.push(Job::Landed { key, serial, frame });
            }
        }
        jobs
    }

    /// Where nothing of a blob is missing, but for a look at what an earlier process kept: the jobs that do that. Readers may never come to those chunks
    /// again, for the kernel has their pages; and only then is the blob complete.
    fn check_the_rest(&mut self, node: u64) -> Vec<Job> {
        let rest: Vec<u32> = match self.blobs.get(&node) {
            Some(blob) if blob.kept > 0 && blob.whole + blob.kept == blob.table.count() => {
                let chunks = (0..).zip(&blob.chunks);
                chunks
                    .filter(|(_, state)| **state == Chunk::Kept)
                    .map(|(chunk, _)| chunk)
                    .collect()
            }
            _ => return Vec::new(),
        };
        rest.into_iter()
            .filter_map(|chunk| self.want(Key { node, chunk }, Priority::Prefetch, None))
            .collect()
    }

    /// Gives up the chunks used least recently until `length` more bytes fit under `bound`; false if they can't.
    fn make_room(&mut self, length: u64, bound: u64) -> bool {
        while self.used + length > bound {
            let pins = &self.pins;
            let Some(key) = self.lru.iter().find(|key| !pins.contains_key(key)) else {
                return false;
            };
            let Some(blob) = self.blobs.get_mut(&key.node) else {
                self.lru.remove(&key);
                continue;
            };
            // A second name means that the service took the file as a whole without saying so.
            if blob.file.is_linked() {
                self.seal(key.node);
                continue;
            }
            let length = blob.table.length_of(key.chunk).into();
            if blob
                .file
                .punch(blob.table.start_of(key.chunk), length)
                .is_err()
            {
                return false;
            }
            let state = &mut blob.chunks[key.chunk as usize];
            match *state {
                Chunk::Present => blob.whole -= 1,
                Chunk::Kept => blob.kept -= 1,
                Chunk::Absent | Chunk::Zeros => {}
            }
            *state = Chunk::Absent;
            self.lru.remove(&key);
            self.used -= length;
        }
        true
    }

    /// Takes a blob's chunks out of what may be given up.
    fn seal(&mut self, node: u64) {
        let Some(blob) = self.blobs.get_mut(&node) else {
            return;
        };
        blob.sealed = true;
        for chunk in 0..blob.table.count() {
            if self.lru.remove(&Key { node, chunk }) {
                self.used -= u64::from(blob.table.length_of(chunk));
            }
        }
    }
}

impl Blobs {
    /// Takes over what an earlier process left in `directory`.
    pub fn open(
        directory: Directory,
        device: Arc<Device>,
        bound: u64,
        patience: Duration,
        jobs: mpsc::Sender<Job>,
        events: Arc<Events>,
    ) -> io::Result<Self> {
        let tables = directory.load_tables()?;
        let blobs = Blobs {
            state: Mutex::new(State {
                blobs: HashMap::new(),
                flights: Flights::new(),
                lru: Lru::new(),
                used: 0,
                pins: HashMap::new(),
                recent: VecDeque::new(),
                link: None,
                said_full: None,
                sandboxes: HashMap::new(),
                reads: 0,
            }),
            busy: Condvar::new(),
            device,
            directory,
            bound,
            patience,
            jobs,
            events,
            changing: Mutex::new(()),
            who: Who::default(),
        };
        for (hex, raw) in tables {
            // A table that this version can't read is one that nobody has registered with it.
            if let (Some(node), Ok(table)) = (node_of(&hex), Table::parse(&raw)) {
                // The others shall be served: this one's readers get EIO, until it is registered anew.
                if let Err(error) = blobs.add(hex, node, table) {
                    eprintln!("dsec-blobfs: {error}");
                }
            }
        }
        Ok(blobs)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic aborts the process, so a poisoned lock can't be seen.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, jobs: impl IntoIterator<Item = Job>) {
        for job in jobs {
            // The workers live as long as the process.
            let _ = self.jobs.send(job);
        }
    }

    // -- what the service asks for

    /// Lets a blob be seen. Repeatable with the same table.
    pub fn register(&self, hex: &str, raw: &[u8]) -> Result<(), Refusal> {
        let node = node_of(hex).ok_or(Refusal("invalid_argument", format!("{hex}: no sha256")))?;
        let table = Table::parse(raw).map_err(|Invalid(what)| {
            Refusal(
                "invalid_argument",
                format!("the chunk table of {hex}: {what}"),
            )
        })?;
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = self.lock().blobs.get(&node) {
            return if known.hex == hex && *known.table == table {
                Ok(())
            } else {
                Err(Refusal(
                    "conflict",
                    format!("{} is registered with another chunk table, or another blob in its place: forget it first", known.hex),
                ))
            };
        }
        self.directory.save_table(hex, raw)?;
        self.add(hex.to_owned(), node, table)
            .inspect_err(|_| drop(self.directory.remove(hex)))?;
        Ok(())
    }

    fn add(&self, hex: String, node: u64, table: Table) -> io::Result<()> {
        let file = self.directory.open_data(&hex, &table)?;
        let kept = file.survey(&table).map_err(|error| {
            let message = format!("looking for what is kept of {hex}: {error}");
            io::Error::new(error.kind(), message)
        })?;
        let sealed = file.is_linked();
        let chunks: Vec<Chunk> = table
            .entries
            .iter()
            .zip(&kept)
            .map(|(entry, kept)| match (entry.kind, kept) {
                (Kind::Zeros, _) => Chunk::Zeros,
                (_, true) => Chunk::Kept,
                (_, false) => Chunk::Absent,
            })
            .collect();
        let mut state = self.lock();
        let blob = Blob {
            hex,
            whole: chunks
                .iter()
                .filter(|chunk| **chunk == Chunk::Zeros)
                .count() as u32,
            kept: chunks.iter().filter(|chunk| **chunk == Chunk::Kept).count() as u32,
            file: Arc::new(file),
            sealed,
            leaving: false,
            readers: Readers::of(table.chunk_bytes),
            disk_readers: Readers::of(DISK_PIECE),
            trace: None,
            pages: vec![0; table.size.div_ceil(BLOCK * 64) as usize],
            needed: 0,
            fetched: 0,
            from_cache: 0,
            failed_at: None,
            chunks,
            table: Arc::new(table),
        };
        if !sealed {
            for (chunk, _) in blob
                .chunks
                .iter()
                .enumerate()
                .filter(|(_, chunk)| **chunk == Chunk::Kept)
            {
                let chunk = chunk as u32;
                state.used += u64::from(blob.table.length_of(chunk));
                state.lru.touch(Key { node, chunk });
            }
        }
        let complete = blob.is_complete().then(|| Event::Complete {
            blob: blob.hex.clone(),
        });
        state.blobs.insert(node, blob);
        state.make_room(0, self.bound);
        let jobs = state.check_the_rest(node);
        drop(state);
        self.tell(complete);
        self.run(jobs);
        Ok(())
    }

    /// Lets go of a blob and of its files.
    pub fn forget(&self, hex: &str) -> Result<(), Refusal> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let node = {
            let mut state = self.lock();
            let (node, blob) = state.find(hex)?;
            blob.leaving = true;
            node
        };
        // Not under the lock: the kernel may be waiting for the answer to a LOOKUP before it takes this. That it doesn't know the name is fine.
        let _ = self.device.drop_name(hex.as_bytes());
        let in_use = self.device.has_inode(node);
        let mut state = self.lock();
        if !matches!(in_use, Ok(false)) {
            if let Some(blob) = state.blobs.get_mut(&node) {
                blob.leaving = false;
            }
            in_use?;
            return Err(Refusal(
                "conflict",
                format!("{hex} is open or mounted: unmount its layer first"),
            ));
        }
        state.seal(node);
        state.flights.land_all(|key| key.node == node);
        state.recent.retain(|(key, _)| key.node != node);
        state.blobs.remove(&node);
        drop(state);
        Ok(self.directory.remove(hex)?)
    }

    /// Fetches chunks that nobody waits for, behind everything else.
    pub fn prefetch(&self, hex: &str, chunks: &[u32]) -> Result<(), Refusal> {
        let mut state = self.lock();
        let (node, blob) = state.find(hex)?;
        let count = blob.table.count();
        if let Some(beyond) = chunks.iter().find(|chunk| **chunk >= count) {
            return Err(Refusal(
                "invalid_argument",
                format!("chunk {beyond}: {hex} has {count}"),
            ));
        }
        let jobs: Vec<Job> = chunks
            .iter()
            .filter_map(|chunk| {
                let key = Key {
                    node,
                    chunk: *chunk,
                };
                state.want(key, Priority::Prefetch, None)
            })
            .collect();
        self.send(&mut state);
        self.busy.notify_one();
        drop(state);
        self.run(jobs);
        Ok(())
    }

    /// Begins to take note of a blob's chunks as they are first read.
    pub fn trace_start(&self, hex: &str) -> Result<(), Refusal> {
        self.lock().find(hex)?.1.trace = Some(Trace {
            since: Instant::now(),
            seen: HashSet::new(),
            touches: Vec::new(),
        });
        Ok(())
    }

    /// Ends that, and returns (chunk, milliseconds since the start) in the order of the first reads.
    pub fn trace_take(&self, hex: &str) -> Result<Vec<(u32, u32)>, Refusal> {
        let trace = self.lock().find(hex)?.1.trace.take();
        trace.map(|trace| trace.touches).ok_or_else(|| {
            Refusal(
                "conflict",
                format!("no trace of {hex} was started (since this process began)"),
            )
        })
    }

    /// Promises that a complete blob's file stays as it is: the caller may rely on it as a whole. Its content is on the disk then.
    pub fn seal(&self, hex: &str) -> Result<(), Refusal> {
        let file = {
            let mut state = self.lock();
            let (node, blob) = state.find(hex)?;
            if !blob.is_complete() {
                return Err(Refusal("conflict", format!("{hex} is not complete")));
            }
            let file = blob.file.clone();
            state.seal(node);
            file
        };
        Ok(file.sync()?)
    }

    /// Figures of these blobs (those that are unknown are left out), or of all.
    pub fn stats(&self, wanted: Option<&[String]>) -> Totals {
        let state = self.lock();
        let figures = |blob: &Blob| Figures {
            hex: blob.hex.clone(),
            size: blob.table.size,
            needed: blob.needed,
            fetched: blob.fetched,
            from_cache: blob.from_cache,
            complete: blob.is_complete(),
        };
        let blobs = match wanted {
            None => state.blobs.values().map(figures).collect(),
            Some(names) => names
                .iter()
                .filter_map(|hex| {
                    state
                        .blobs
                        .get(&node_of(hex)?)
                        .filter(|blob| blob.hex == *hex)
                })
                .map(figures)
                .collect(),
        };
        Totals {
            cache_bytes: self.bound,
            cache_used: state.used,
            connected: state.link.is_some(),
            blobs,
        }
    }

    /// What a sandbox has read since this process began.
    pub fn reads_of(&self, sandbox: &str) -> Reads {
        self.lock()
            .sandboxes
            .get(sandbox)
            .copied()
            .unwrap_or_default()
    }

    // -- what the kernel asks for

    /// The file of this name, if there is one.
    pub fn lookup(&self, name: &[u8]) -> Option<Attributes> {
        let node = node_of(std::str::from_utf8(name).ok()?)?;
        let state = self.lock();
        let blob = state.blobs.get(&node)?;
        (blob.hex.as_bytes() == name && !blob.leaving).then_some(Attributes {
            node,
            size: blob.table.size,
            is_directory: false,
        })
    }

    pub fn attributes(&self, node: u64) -> Option<Attributes> {
        self.lock().blobs.get(&node).map(|blob| Attributes {
            node,
            size: blob.table.size,
            is_directory: false,
        })
    }

    /// Numbers and names of all files, in an order that stays.
    pub fn names(&self) -> Vec<(u64, String)> {
        let state = self.lock();
        let mut names: Vec<_> = state
            .blobs
            .iter()
            .filter(|(_, blob)| !blob.leaving)
            .map(|(node, blob)| (*node, blob.hex.clone()))
            .collect();
        names.sort_unstable();
        names
    }

    /// Answers a read, now or when its chunks are there. `buffer` is the caller's, for the content.
    pub fn read(&self, request: &Request, range: Range, buffer: &mut Vec<u8>) {
        let unique = request.unique;
        // A second time if the cache's disk fails; then from the store.
        for _ in 0..2 {
            let mut jobs = Vec::new();
            let plan = self.plan(request, &range, &mut jobs);
            self.run(jobs);
            match plan {
                Plan::Done => return,
                Plan::Ready {
                    file,
                    length,
                    pinned,
                    next,
                } => {
                    if next.1 > 0 {
                        file.will_need(next.0, next.1);
                    }
                    if buffer.len() < length {
                        buffer.resize(length, 0);
                    }
                    let read = file.read(range.offset, &mut buffer[..length]);
                    let mut state = self.lock();
                    pinned.iter().for_each(|key| state.unpin(*key));
                    match read {
                        Ok(()) => {
                            drop(state);
                            return self.device.reply(unique, &buffer[..length]);
                        }
                        Err(error) => state.doubt(&pinned, &error),
                    }
                }
                Plan::Partly {
                    pending,
                    file,
                    parts,
                    recent,
                } => {
                    for (at, content) in recent {
                        pending.supply(at, &content);
                    }
                    for (key, at, length) in parts {
                        let length = length as usize;
                        if buffer.len() < length {
                            buffer.resize(length, 0);
                        }
                        let read = file.read(at, &mut buffer[..length]);
                        let mut state = self.lock();
                        state.unpin(key);
                        match read {
                            Ok(()) => {
                                drop(state);
                                pending.supply(at, &buffer[..length]);
                            }
                            Err(error) => {
                                state.doubt(&[key], &error);
                                drop(state);
                                pending.fail();
                            }
                        }
                    }
                    return;
                }
            }
        }
        self.device.refuse(unique, libc::EIO);
    }

    fn plan(&self, request: &Request, range: &Range, jobs: &mut Vec<Job>) -> Plan {
        let (unique, node, offset) = (request.unique, request.node, range.offset);
        let now = Instant::now();
        let sandbox = self.who.is(request.task, now);
        let mut guard = self.lock();
        let state = &mut *guard;
        let Some(blob) = state.blobs.get_mut(&node) else {
            drop(guard);
            self.device.refuse(unique, libc::EIO);
            return Plan::Done;
        };
        let length = blob
            .table
            .size
            .saturating_sub(offset)
            .min(u64::from(range.size));
        if length == 0 {
            drop(guard);
            self.device.reply(unique, &[]);
            return Plan::Done;
        }
        blob.note(offset, length, now);
        let (table, file) = (blob.table.clone(), blob.file.clone());
        let chunks = table.chunks_of(offset, length);
        let (first, last) = (*chunks.start(), *chunks.end());
        let mut there = Vec::with_capacity(2);
        let mut missing = Vec::new();
        for chunk in chunks {
            let key = Key { node, chunk };
            match blob.chunks[chunk as usize] {
                Chunk::Present | Chunk::Zeros => there.push(key),
                Chunk::Absent | Chunk::Kept => missing.push(key),
            }
        }
        let is_first = missing.iter().any(|key| !state.flights.has(*key));
        let ahead = blob.readers.reads(first, last, is_first);
        for key in &there {
            if !blob.sealed && blob.chunks[key.chunk as usize] == Chunk::Present {
                state.lru.touch(*key);
            }
        }
        let mut next = (0, 0);
        if missing.is_empty() {
            blob.from_cache += length;
            next = blob.next_on_disk(offset, length);
        }
        if let Some(sandbox) = sandbox {
            let new = missing.iter().filter(|key| !state.flights.has(**key));
            let frame = |key: &Key| table.frames(key.chunk, key.chunk).map(|frame| frame.1);
            let fetched: u64 = new.filter_map(frame).map(u64::from).sum();
            let is_there = missing.is_empty();
            let reads = state.reads_of(sandbox);
            reads.needed += length;
            reads.fetched += fetched;
            reads.from_cache += if is_there { length } else { 0 };
        }
        for key in &there {
            state.pin(*key);
        }
        let plan = if missing.is_empty() {
            Plan::Ready {
                file,
                length: length as usize,
                pinned: there,
                next,
            }
        } else {
            let pending = Arc::new(Pending::new(
                self.device.clone(),
                unique,
                offset,
                length as usize,
                now + self.patience,
            ));
            let mut recent = Vec::new();
            for key in missing {
                match state.recent(key) {
                    Some(content) => recent.push((table.start_of(key.chunk), content)),
                    None => jobs.extend(state.want(key, Priority::Read, Some(pending.clone()))),
                }
            }
            let end = offset + length;
            let parts = there
                .into_iter()
                .map(|key| {
                    let start = table.start_of(key.chunk);
                    let stop = (start + u64::from(table.length_of(key.chunk))).min(end);
                    let at = start.max(offset);
                    (key, at, (stop - at) as u32)
                })
                .collect();
            Plan::Partly {
                pending,
                file,
                parts,
                recent,
            }
        };
        for chunk in ahead {
            let key = Key { node, chunk };
            jobs.extend(state.want(key, Priority::Ahead, None));
        }
        if !state.flights.is_empty() {
            self.send(state);
            self.busy.notify_one();
        }
        plan
    }

    // -- chunks on their way

    /// Asks the store for what is next, as far as its windows allow.
    fn send(&self, state: &mut State) {
        let State {
            blobs,
            flights,
            link,
            ..
        } = state;
        let Some(stream) = link else {
            return;
        };
        let now = Instant::now();
        let bytes = |first: Key, last: Key| {
            let table = &blobs.get(&first.node)?.table;
            Some(u64::from(table.frames(first.chunk, last.chunk)?.1))
        };
        while let Some((id, run)) = flights.next_to_send(now, bytes) {
            let (first, last) = (run[0], run[run.len() - 1]);
            let known = blobs.get(&first.node).and_then(|blob| {
                let (offset, length) = blob.table.frames(first.chunk, last.chunk)?;
                Some(fetch::request(id, &blob.hex, offset, length))
            });
            let Some(request) = known else {
                run.iter().for_each(|key| drop(flights.land(*key)));
                continue;
            };
            if wire::passing::send_frame(stream, &request, None).is_err() {
                // Its reader sees that too, and connects again.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                return;
            }
        }
    }

    pub fn link_up(&self, stream: UnixStream) {
        let mut state = self.lock();
        state.link = Some(stream);
        self.send(&mut state);
    }

    pub fn link_lost(&self) {
        let mut state = self.lock();
        state.link = None;
        state.flights.link_lost();
    }

    /// The store's answer to one request.
    pub fn answered(&self, id: u64, answer: Result<Vec<u8>, fetch::Failure>) {
        let mut state = self.lock();
        let run = state.flights.answered(id);
        let waited = || {
            run.iter()
                .filter_map(|(key, serial)| Some((*key, (*serial)?)))
        };
        match answer {
            Ok(frames) => {
                let jobs = state.landed(&run, frames);
                drop(state);
                self.run(jobs);
            }
            Err(failure) if failure.retry => {
                let now = Instant::now();
                for (key, _) in waited() {
                    state.flights.rest(key, now);
                }
                self.send(&mut state);
            }
            // One of them may be at fault for all.
            Err(_) if run.len() > 1 => {
                waited().for_each(|(key, _)| state.flights.separate(key));
                self.send(&mut state);
            }
            Err(failure) => {
                if let Some((key, _)) = waited().next() {
                    self.give_up(state, key, &failure.reason);
                }
            }
        }
    }

    /// Nobody gets this chunk, for now: the next read tries again.
    fn give_up(&self, mut state: MutexGuard<'_, State>, key: Key, reason: &str) {
        let waiters = state.flights.land(key);
        self.send(&mut state);
        let told = if waiters.is_empty() {
            None
        } else {
            state.failure(key, reason)
        };
        drop(state);
        waiters.iter().for_each(|waiter| waiter.fail());
        self.tell(told);
    }

    fn tell(&self, events: impl IntoIterator<Item = Event>) {
        events
            .into_iter()
            .for_each(|event| self.events.tell(&event));
    }

    /// Does one job; called by the workers.
    pub fn work(&self, job: Job) {
        match job {
            Job::Check { key, serial } => self.check(key, serial),
            Job::Landed { key, serial, frame } => self.land(key, serial, frame),
        }
    }

    fn source(&self, key: Key, serial: u64) -> Option<(Arc<CacheFile>, Arc<Table>)> {
        let state = self.lock();
        let blob = state.blobs.get(&key.node)?;
        state
            .flights
            .is_current(key, serial)
            .then(|| (blob.file.clone(), blob.table.clone()))
    }

    /// Looks at what an earlier process kept of a chunk.
    fn check(&self, key: Key, serial: u64) {
        let Some((file, table)) = self.source(key, serial) else {
            return self.lock().unpin(key);
        };
        let start = table.start_of(key.chunk);
        let mut content = vec![0; table.length_of(key.chunk) as usize];
        let right = file.read(start, &mut content).is_ok()
            && chunk::is_right(&table.entries[key.chunk as usize], &content);
        let mut state = self.lock();
        state.unpin(key);
        if !state.flights.is_current(key, serial) {
            return;
        }
        if right {
            return self.arrived(state, key, start, &content);
        }
        // A blob that was taken as a whole is somebody else's file as well, and a chunk that became doubtful may still be read by somebody: these are
        // overwritten in place.
        let is_ours = state.blobs.get(&key.node).is_some_and(|blob| !blob.sealed);
        if is_ours && !state.pins.contains_key(&key) {
            let _ = file.punch(start, content.len() as u64);
        }
        if state.lru.remove(&key) {
            state.used -= content.len() as u64;
        }
        if let Some(blob) = state.blobs.get_mut(&key.node) {
            blob.chunks[key.chunk as usize] = Chunk::Absent;
            // It was Kept: a chunk that is being checked is pinned.
            blob.kept -= 1;
        }
        state.flights.enqueue(key);
        self.send(&mut state);
    }

    /// Takes a frame to pieces; answers those who wait, and then keeps the chunk.
    fn land(&self, key: Key, serial: u64, frame: Vec<u8>) {
        let Some((file, table)) = self.source(key, serial) else {
            return;
        };
        let entry = &table.entries[key.chunk as usize];
        let length = table.length_of(key.chunk);
        let content = match chunk::decode(entry, length, frame) {
            Ok(content) => content,
            Err(reason) => {
                let mut state = self.lock();
                if !state.flights.is_current(key, serial) {
                    return;
                }
                if state.flights.was_wrong(key) {
                    return self.send(&mut state);
                }
                let reason = format!("chunk {}: {reason}", key.chunk);
                return self.give_up(state, key, &reason);
            }
        };
        let start = table.start_of(key.chunk);
        let (waiters, room, sealed) = {
            let mut state = self.lock();
            if !state.flights.is_current(key, serial) {
                return;
            }
            let waiters = state.flights.take_waiters(key);
            let sealed = state.blobs.get(&key.node).is_some_and(|blob| blob.sealed);
            let room = sealed || state.make_room(length.into(), self.bound);
            if room && !sealed {
                state.used += u64::from(length);
            }
            (waiters, room, sealed)
        };
        waiters
            .iter()
            .for_each(|waiter| waiter.supply(start, &content));
        let kept = if room {
            file.write(start, &content)
        } else {
            Err(io::Error::other("every chunk of the cache is being read"))
        };
        let mut state = self.lock();
        let is_current = state.flights.is_current(key, serial);
        if room && !sealed && (kept.is_err() || !is_current) {
            state.used -= u64::from(length);
        }
        if !is_current {
            return;
        }
        match kept {
            Ok(()) => {
                if !sealed {
                    state.lru.touch(key);
                }
                self.arrived(state, key, start, &content);
            }
            Err(error) => {
                // Part of it may have been allocated. What became doubtful may still be read by somebody, who must not find a hole.
                if !sealed && !state.pins.contains_key(&key) {
                    let _ = file.punch(start, length.into());
                }
                self.pass(state, key, start, content, &error);
            }
        }
    }

    /// A chunk is in the file and checked.
    fn arrived(&self, mut state: MutexGuard<'_, State>, key: Key, start: u64, content: &[u8]) {
        let waiters = state.flights.land(key);
        let (mut complete, mut jobs) = (None, Vec::new());
        if let Some(blob) = state.blobs.get_mut(&key.node) {
            let before = std::mem::replace(&mut blob.chunks[key.chunk as usize], Chunk::Present);
            blob.whole += 1;
            complete = blob.is_complete().then(|| Event::Complete {
                blob: blob.hex.clone(),
            });
            if before == Chunk::Kept {
                blob.kept -= 1;
            } else {
                jobs = state.check_the_rest(key.node);
            }
        }
        self.send(&mut state);
        drop(state);
        waiters
            .iter()
            .for_each(|waiter| waiter.supply(start, content));
        self.tell(complete);
        self.run(jobs);
    }

    /// A chunk is right but can't be kept: it goes to those who wait, and to the next ones for a while.
    fn pass(
        &self,
        mut state: MutexGuard<'_, State>,
        key: Key,
        start: u64,
        content: Vec<u8>,
        error: &io::Error,
    ) {
        let waiters = state.flights.land(key);
        let content = Arc::new(content);
        state.recent.push_back((key, content.clone()));
        let mut held: usize = state.recent.iter().map(|(_, one)| one.len()).sum();
        while held > RECENT && state.recent.len() > 1 {
            held -= state.recent.pop_front().map_or(0, |(_, one)| one.len());
        }
        self.send(&mut state);
        let is_due = state.said_full.is_none_or(|at| at.elapsed() >= FULL_EVERY);
        if is_due {
            state.said_full = Some(Instant::now());
        }
        drop(state);
        waiters
            .iter()
            .for_each(|waiter| waiter.supply(start, &content));
        if is_due {
            let reason = format!("chunks can't be kept, and are fetched each time: {error}");
            eprintln!("dsec-blobfs: {reason}");
            self.tell([Event::Uncached { reason }]);
        }
    }

    /// Lets time pass: forever, in a thread of its own. Readers that have waited too long get EIO; what rested is asked for again; a store that
    /// doesn't answer is taken for gone.
    pub fn keep_time(&self) {
        const TICK: Duration = Duration::from_millis(100);
        loop {
            let mut state = self.lock();
            while state.flights.is_empty() {
                state = self
                    .busy
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            let now = Instant::now();
            state.flights.wake(now);
            let expired = state.flights.expire(|waiter| waiter.deadline <= now);
            let is_stuck = state
                .flights
                .oldest_sent()
                .is_some_and(|since| now.saturating_duration_since(since) > self.patience);
            let reason = match &state.link {
                None => "nobody fetches: the fetcher's socket has not been reachable",
                Some(_) => "the store has not delivered it",
            };
            if let (true, Some(stream)) = (is_stuck, &state.link) {
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
            self.send(&mut state);
            let told: Vec<Event> = expired
                .iter()
                .filter_map(|(key, _)| {
                    let reason = format!(
                        "chunk {}: {reason} for {} s",
                        key.chunk,
                        self.patience.as_secs()
                    );
                    state.failure(*key, &reason)
                })
                .collect();
            drop(state);
            expired.iter().for_each(|(_, waiter)| waiter.fail());
            self.tell(told);
            std::thread::sleep(TICK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::table;
    use std::os::unix::fs::FileExt;
    use std::path::{Path, PathBuf};

    /// Blobs over what is in a directory, the jobs that they want done, and the directory, which is removed at the end.
    struct Scene {
        blobs: Blobs,
        jobs: mpsc::Receiver<Job>,
        path: PathBuf,
    }

    impl Scene {
        fn opened(name: &str, prepare: impl FnOnce(&Path, &Directory)) -> Self {
            let path =
                std::env::temp_dir().join(format!("dsec-blobs-{}-{name}", std::process::id()));
            let directory = Directory::open(path.clone()).unwrap();
            prepare(&path, &directory);
            let null = std::fs::File::options().write(true).open("/dev/null");
            let (jobs, to_do) = mpsc::channel();
            let blobs = Blobs::open(
                directory,
                Arc::new(Device::new(null.unwrap().into())),
                1 << 30,
                Duration::from_secs(60),
                jobs,
                Arc::default(),
            );
            Scene {
                blobs: blobs.unwrap(),
                jobs: to_do,
                path,
            }
        }

        fn work(&self) {
            self.jobs.try_iter().for_each(|job| self.blobs.work(job));
        }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.path).unwrap();
        }
    }

    #[test]
    fn a_blob_whose_file_cant_be_opened_costs_no_other() {
        let [good, bad] = ["a", "b"].map(|letter| letter.repeat(64));
        let scene = Scene::opened("bad", |path, directory| {
            for blob in [&good, &bad] {
                directory.save_table(blob, &table(4096)).unwrap();
            }
            std::fs::create_dir(path.join(&bad)).unwrap();
        });
        let names: Vec<String> = scene
            .blobs
            .names()
            .into_iter()
            .map(|(_, name)| name)
            .collect();
        assert_eq!(names, [good]);
    }

    /// The third chunk of four was lost, the first one is wrong.
    #[test]
    fn what_is_left_is_checked_once_nothing_is_missing_whatever_was_wrong_before() {
        let hex = "a".repeat(64);
        let scene = Scene::opened("wrong", |path, directory| {
            directory.save_table(&hex, &table(4 * 4096)).unwrap();
            let file = std::fs::File::create(path.join(&hex)).unwrap();
            for (chunk, byte) in [(0, 1), (1, 0), (3, 0)] {
                file.write_all_at(&[byte; 4096], chunk * 4096).unwrap();
            }
        });
        let asked = |chunk: u32| {
            scene.blobs.prefetch(&hex, &[chunk]).unwrap();
            let (node, _) = scene.blobs.names()[0];
            (Key { node, chunk }, scene.jobs.try_iter().next())
        };
        let (first, job) = asked(0);
        let Some(Job::Check { serial: number, .. }) = job else {
            panic!("a chunk that is there is looked at first");
        };
        scene.blobs.work(Job::Check {
            key: first,
            serial: number,
        });
        let frame = || vec![0; 4096];
        scene.blobs.work(Job::Landed {
            key: first,
            serial: number,
            frame: frame(),
        });
        let (third, job) = asked(2);
        assert!(job.is_none(), "nothing of it is there to be checked");
        scene.blobs.work(Job::Landed {
            key: third,
            serial: number + 1,
            frame: frame(),
        });
        scene.work();
        assert!(scene.blobs.stats(None).blobs[0].complete);
        scene.blobs.seal(&hex).unwrap();
    }

    #[test]
    fn what_an_earlier_process_kept_cant_be_sealed_before_it_is_checked() {
        let hex = "a".repeat(64);
        let scene = Scene::opened("seal", |path, directory| {
            directory.save_table(&hex, &table(2 * 4096)).unwrap();
            let file = std::fs::File::create(path.join(&hex)).unwrap();
            file.write_all_at(&[0; 2 * 4096], 0).unwrap();
        });
        assert_eq!(scene.blobs.seal(&hex).unwrap_err().0, "conflict");
        scene.work();
        scene.blobs.seal(&hex).unwrap();
    }
}
