//! dsec-blobfs: one process a node, without any privilege, that shows every registered data blob as a file of full length. What is read and not
//! here is fetched in chunks, and each chunk is checked before a byte of it goes anywhere. `docs/wire.md` has the interfaces.

mod blobs;
mod cache;
mod chunk;
mod control;
mod device;
mod events;
mod fetch;
mod flights;
mod lru;
mod options;
mod pending;
mod readahead;
mod spawner;
mod table;
mod who;

use std::io;
use std::sync::{mpsc, Arc, Mutex, PoisonError};

use blobs::{Blobs, Job};
use cache::Directory;
use device::{opcode, Attributes, Device, Request};
use events::Events;
use options::Options;

/// Threads that read the kernel's requests: none of them ever waits for the store, only for the cache's disk.
const READERS: usize = 4;

fn main() {
    let result = match options::parse(std::env::args_os().skip(1)) {
        Ok(Some(options)) => run(&options).map_err(|error| (1, error.to_string())),
        Ok(None) => {
            print!("{}", options::HELP);
            Ok(())
        }
        Err(message) => Err((2, message)),
    };
    if let Err((code, message)) = result {
        eprintln!("dsec-blobfs: {message}");
        std::process::exit(code);
    }
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map(drop)
}

/// Runs until the connection to the kernel ends, which is an error: whoever starts it next gets another one.
fn run(options: &Options) -> io::Result<()> {
    // A descriptor is open for every registered blob.
    wire::process::raise_descriptor_limit()?;
    // Before anything else, so that an earlier process has ended: two must not read the same connection.
    let directory = Directory::open(options.state_dir.join("blobfs"))?;
    let spawner_socket = options.run_dir.join("spawner.sock");
    let taken = spawner::take(&spawner_socket).map_err(|error| {
        io::Error::other(format!(
            "the spawner at {}: {error}",
            spawner_socket.display()
        ))
    })?;
    let device = Arc::new(Device::new(taken.descriptor));
    let events = Arc::new(Events::default());
    let (jobs, to_do) = mpsc::channel();
    let blobs = Arc::new(Blobs::open(
        directory,
        device.clone(),
        options.cache_bytes,
        options.wait,
        jobs,
        events.clone(),
    )?);
    let listener = control::bind(&options.run_dir.join("blobfs.sock"))?;
    let to_do = Arc::new(Mutex::new(to_do));
    for _ in 0..std::thread::available_parallelism()?.get() {
        let (blobs, to_do) = (blobs.clone(), to_do.clone());
        start("chunks", move || {
            while let Some(job) = next(&to_do) {
                blobs.work(job);
            }
        })?;
    }
    let fetching = blobs.clone();
    let fetch_socket = options.run_dir.join("fetch.sock");
    start("fetch", move || fetch::run(&fetching, &fetch_socket))?;
    let timed = blobs.clone();
    start("time", move || timed.keep_time())?;
    let controlled = blobs.clone();
    start("control", move || {
        control::run(&controlled, &events, &listener);
    })?;
    let held = device.clone();
    start("spawner", move || {
        let error = spawner::hold(taken.stream, &held, &spawner_socket);
        eprintln!("dsec-blobfs: the spawner doesn't take the connection back: {error}");
        std::process::exit(1);
    })?;
    for _ in 1..READERS {
        let (device, blobs) = (device.clone(), blobs.clone());
        start("reads", move || exit(serve(&device, &blobs)))?;
    }
    exit(serve(&device, &blobs))
}

fn exit(result: io::Result<()>) -> ! {
    let reason = match result {
        Ok(()) => "the connection to the kernel has ended".to_owned(),
        Err(error) => format!("reading the kernel's requests: {error}"),
    };
    eprintln!("dsec-blobfs: {reason}");
    std::process::exit(1)
}

fn next(inbox: &Mutex<mpsc::Receiver<Job>>) -> Option<Job> {
    inbox
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .recv()
        .ok()
}

/// Answers the kernel, as one of several.
fn serve(device: &Device, blobs: &Blobs) -> io::Result<()> {
    let mut room = vec![0; device::REQUEST_ROOM];
    let mut content = Vec::new();
    while let Some(request) = device.next(&mut room)? {
        answer(device, blobs, &request, &mut content);
    }
    Ok(())
}

fn answer(device: &Device, blobs: &Blobs, request: &Request, content: &mut Vec<u8>) {
    let unique = request.unique;
    match request.opcode {
        opcode::READ => {
            let range = request.range();
            blobs.read(request, range, content);
        }
        opcode::LOOKUP if request.node == device::ROOT => match blobs.lookup(request.name()) {
            Some(found) => device.reply(unique, &found.entry()),
            None => device.refuse(unique, libc::ENOENT),
        },
        opcode::GETATTR if request.node == device::ROOT => {
            device.reply(unique, &Attributes::root().attr());
        }
        opcode::GETATTR => match blobs.attributes(request.node) {
            Some(found) => device.reply(unique, &found.attr()),
            None => device.refuse(unique, libc::ESTALE),
        },
        opcode::READDIR => {
            let range = request.range();
            let mut out = Vec::new();
            let names = blobs.names();
            for (index, (node, name)) in names.iter().enumerate().skip(range.offset as usize) {
                let next = index as u64 + 1;
                if !device::add_entry(&mut out, range.size as usize, *node, next, name.as_bytes()) {
                    break;
                }
            }
            device.reply(unique, &out);
        }
        opcode::INIT => device.reply(unique, &device::init(request.body)),
        opcode::STATFS => device.reply(unique, &device::statfs()),
        // These have no answer.
        opcode::FORGET | opcode::BATCH_FORGET => {}
        // OPEN and OPENDIR among them: the kernel does without from then on. It keeps no state here that a restart could lose.
        _ => device.refuse(unique, libc::ENOSYS),
    }
}
