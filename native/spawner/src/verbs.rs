//! The verbs: requests parsed strictly into what is to be done, and answers. No privileged act happens here.

use wire::digest::is_digest;
use wire::value::{Mismatch, Value, Writer};

use crate::cgroup::{is_group_name, Figures};
use crate::changes::Page;
use crate::create::{Created, Spec, MAX_EXTRA_IDS};
use crate::denials::Denial;
use crate::snapshot::{is_snapshot_name, Order, Taken};

/// overlayfs takes 500; nobody stacks more than a hundred.
const MAX_LAYERS: usize = 128;
const MAX_HOSTNAME: usize = 63;
const MAX_NAMES: usize = 40_000;
const MAX_DIFF: u64 = 100_000;
/// Smallest limits with which a sandbox's own agent still runs.
const MIN_MEMORY: u64 = 8 << 20;
const MIN_DISK: u64 = 1 << 20;
const MIN_PIDS: u64 = 4;
/// Of what stays out of a layer.
const MAX_GLOBS: usize = 512;
const MAX_GLOB: usize = 1024;
const MAX_HISTORY: u64 = 64 << 20;

#[derive(Debug)]
pub enum Verb {
    Hello,
    LayerMount {
        meta: String,
        blob: Option<String>,
        lazy: bool,
    },
    LayerUnmount {
        meta: String,
    },
    Layers,
    FuseTake,
    FuseGive,
    Create(Box<Spec>),
    Kill {
        sandbox: String,
        keep_scratch: bool,
    },
    Usage {
        sandboxes: Vec<String>,
    },
    List,
    Diff {
        sandbox: String,
        after: Vec<u8>,
        limit: u64,
    },
    Snapshot {
        sandbox: String,
        snapshot: String,
    },
    SnapshotPack(Box<Order>),
    SnapshotRemove {
        snapshot: String,
    },
    Snapshots,
}

/// What is wrong with a request: the word names the argument.
#[derive(Debug, PartialEq, Eq)]
pub struct Bad(pub &'static str);

fn argument<T>(name: &'static str, value: Result<T, Mismatch>) -> Result<T, Bad> {
    value.map_err(|_| Bad(name))
}

fn sandbox(value: &Value) -> Result<String, Bad> {
    let name = argument("sandbox", value.text())?;
    if is_group_name(&name) {
        Ok(name)
    } else {
        Err(Bad("sandbox"))
    }
}

fn snapshot(name: &'static str, value: &Value) -> Result<String, Bad> {
    let text = argument(name, value.text())?;
    if is_snapshot_name(&text) {
        Ok(text)
    } else {
        Err(Bad(name))
    }
}

fn order(map: &Value) -> Result<Order, Bad> {
    let number = |name: &'static str| argument(name, map.get(name).unsigned::<u64>());
    Ok(Order {
        snapshot: snapshot("snapshot", map.get("snapshot"))?,
        exclude: list("exclude", map.get("exclude"), MAX_GLOBS, |value| {
            let glob = argument("exclude", value.text())?;
            if glob.is_empty() || glob.len() > MAX_GLOB || glob.contains('\0') {
                return Err(Bad("exclude"));
            }
            Ok(glob)
        })?,
        max_entries: number("max_entries")?,
        max_bytes: number("max_bytes")?,
        max_meta: number("max_meta")?,
    })
}

fn digest(name: &'static str, value: &Value) -> Result<String, Bad> {
    let text = argument(name, value.text())?;
    if is_digest(&text) {
        Ok(text)
    } else {
        Err(Bad(name))
    }
}

fn at_least(name: &'static str, value: u64, least: u64) -> Result<u64, Bad> {
    if value >= least && value <= i64::MAX as u64 {
        Ok(value)
    } else {
        Err(Bad(name))
    }
}

fn number_or(name: &'static str, value: &Value, default: u64) -> Result<u64, Bad> {
    Ok(argument(name, value.optional(Value::unsigned))?.unwrap_or(default))
}

fn flag(name: &'static str, value: &Value) -> Result<bool, Bad> {
    Ok(argument(name, value.optional(Value::boolean))?.unwrap_or(false))
}

fn list<T>(
    name: &'static str,
    value: &Value,
    most: usize,
    read: impl Fn(&Value) -> Result<T, Bad>,
) -> Result<Vec<T>, Bad> {
    let items = argument(name, value.array())?;
    if items.len() > most {
        return Err(Bad(name));
    }
    items.iter().map(read).collect()
}

fn spec(map: &Value) -> Result<Spec, Bad> {
    let hostname = argument("hostname", map.get("hostname").text())?;
    let name_like = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if hostname.is_empty() || hostname.len() > MAX_HOSTNAME || !hostname.bytes().all(name_like) {
        return Err(Bad("hostname"));
    }
    let layers = list("layers", map.get("layers"), MAX_LAYERS, |value| {
        digest("layers", value)
    })?;
    if layers.is_empty() {
        return Err(Bad("layers"));
    }
    let extra_ids = match map.get("extra_ids") {
        Value::Nil => Vec::new(),
        value => list("extra_ids", value, MAX_EXTRA_IDS, |value| {
            let id: u32 = argument("extra_ids", value.unsigned())?;
            // Below are the sandbox's plain ids; the last number means "no id".
            if id < 65_536 || id == u32::MAX {
                return Err(Bad("extra_ids"));
            }
            Ok(id)
        })?,
    };
    Ok(Spec {
        id: sandbox(map.get("sandbox"))?,
        layers,
        hostname,
        memory: at_least(
            "memory",
            argument("memory", map.get("memory").unsigned())?,
            MIN_MEMORY,
        )?,
        cpu_millis: number_or("cpu_millis", map.get("cpu_millis"), 0)?.min(1_000_000),
        pids: at_least(
            "pids",
            argument("pids", map.get("pids").unsigned())?,
            MIN_PIDS,
        )?,
        disk: at_least(
            "disk",
            argument("disk", map.get("disk").unsigned())?,
            MIN_DISK,
        )?,
        from: match map.get("from") {
            Value::Nil => None,
            value => Some(snapshot("from", value)?),
        },
        extra_ids,
        history: number_or("history", map.get("history"), 8 << 20)?.min(MAX_HISTORY),
    })
}

/// The request's id (0 where it has none that can be read) and what it asks for.
pub fn parse(frame: &[u8]) -> (u64, Result<Verb, Bad>) {
    let Ok(map) = Value::read(frame) else {
        return (0, Err(Bad("request")));
    };
    let id = map.get("id").unsigned().unwrap_or(0);
    (id, verb(&map))
}

fn verb(map: &Value) -> Result<Verb, Bad> {
    Ok(match argument("verb", map.get("verb").text())?.as_str() {
        "hello" => Verb::Hello,
        "layer_mount" => Verb::LayerMount {
            meta: digest("meta", map.get("meta"))?,
            blob: match map.get("blob") {
                Value::Nil => None,
                value => Some(digest("blob", value)?),
            },
            lazy: flag("lazy", map.get("lazy"))?,
        },
        "layer_unmount" => Verb::LayerUnmount {
            meta: digest("meta", map.get("meta"))?,
        },
        "layers" => Verb::Layers,
        "fuse_take" => Verb::FuseTake,
        "fuse_give" => Verb::FuseGive,
        "create" => Verb::Create(Box::new(spec(map)?)),
        "kill" => Verb::Kill {
            sandbox: sandbox(map.get("sandbox"))?,
            keep_scratch: flag("keep_scratch", map.get("keep_scratch"))?,
        },
        "usage" => Verb::Usage {
            sandboxes: list("sandboxes", map.get("sandboxes"), MAX_NAMES, sandbox)?,
        },
        "list" => Verb::List,
        "diff" => Verb::Diff {
            sandbox: sandbox(map.get("sandbox"))?,
            after: argument("after", map.get("after").optional(Value::bytes))?.unwrap_or_default(),
            limit: number_or("limit", map.get("limit"), 10_000)?.min(MAX_DIFF),
        },
        "snapshot" => Verb::Snapshot {
            sandbox: sandbox(map.get("sandbox"))?,
            snapshot: snapshot("snapshot", map.get("snapshot"))?,
        },
        "snapshot_pack" => Verb::SnapshotPack(Box::new(order(map)?)),
        "snapshot_remove" => Verb::SnapshotRemove {
            snapshot: snapshot("snapshot", map.get("snapshot"))?,
        },
        "snapshots" => Verb::Snapshots,
        _ => return Err(Bad("verb")),
    })
}

/// The start of an answer: a map of `id` and `count` further entries.
fn answer(id: u64, count: usize) -> Writer {
    Writer::new().map(count + 1).text("id").unsigned(id)
}

pub fn done(id: u64) -> Vec<u8> {
    answer(id, 0).finish()
}

pub fn error(id: u64, code: &str, message: &str) -> Vec<u8> {
    answer(id, 1)
        .text("error")
        .map(2)
        .text("code")
        .text(code)
        .text("message")
        .text(message)
        .finish()
}

pub fn created(id: u64, slot: u32, socket: &str, made: &Created) -> Vec<u8> {
    let mut out = answer(id, 4)
        .text("pid")
        .unsigned(made.pid as u64)
        .text("slot")
        .unsigned(u64::from(slot))
        .text("socket")
        .text(socket);
    out = out.text("timings").map(made.timings.len());
    for (step, micros) in &made.timings {
        out = out.text(step).unsigned(*micros);
    }
    out.finish()
}

pub fn ended(id: u64, figures: Figures, disk: u64) -> Vec<u8> {
    answer(id, 4)
        .text("cpu_us")
        .unsigned(figures.cpu_us)
        .text("memory_peak")
        .unsigned(figures.memory_peak)
        .text("oom_kills")
        .unsigned(figures.oom_kills)
        .text("disk")
        .unsigned(disk)
        .finish()
}

/// What `hello` tells of the node.
pub struct Facts<'a> {
    pub kernel: &'a str,
    pub cores: u64,
    pub memory: u64,
    pub cgroup: &'a str,
    pub scratch: u64,
    pub scratch_used: u64,
    pub uid_base: u64,
    /// Whom the scratch filesystem charges for shared data.
    pub quotas: &'a str,
    /// Kernel feature to what was found, or to what its lack costs.
    pub features: &'a [(String, String)],
}

pub fn hello(id: u64, facts: &Facts) -> Vec<u8> {
    let out = answer(id, 10)
        .text("version")
        .text(env!("CARGO_PKG_VERSION"))
        .text("kernel")
        .text(facts.kernel)
        .text("cores")
        .unsigned(facts.cores)
        .text("memory")
        .unsigned(facts.memory)
        .text("cgroup")
        .text(facts.cgroup)
        .text("scratch")
        .unsigned(facts.scratch)
        .text("scratch_used")
        .unsigned(facts.scratch_used)
        .text("uid_base")
        .unsigned(facts.uid_base)
        .text("quotas")
        .text(facts.quotas)
        .text("features")
        .map(facts.features.len());
    facts
        .features
        .iter()
        .fold(out, |out, (name, found)| out.text(name).text(found))
        .finish()
}

pub fn layers(id: u64, mounted: &[(String, bool)]) -> Vec<u8> {
    mounted
        .iter()
        .fold(
            answer(id, 1).text("layers").map(mounted.len()),
            |out, (digest, lazy)| out.text(digest).boolean(*lazy),
        )
        .finish()
}

pub fn usage(id: u64, disk: &[(String, u64)]) -> Vec<u8> {
    disk.iter()
        .fold(
            answer(id, 1).text("disk").map(disk.len()),
            |out, (name, bytes)| out.text(name).unsigned(*bytes),
        )
        .finish()
}

/// One sandbox as the kernel holds it.
pub struct Listed {
    pub sandbox: String,
    pub slot: Option<u32>,
    pub pid: i32,
    pub alive: bool,
    pub socket: String,
    pub scratch: bool,
}

pub fn list_answer(id: u64, sandboxes: &[Listed]) -> Vec<u8> {
    let mut out = answer(id, 1).text("sandboxes").array(sandboxes.len());
    for one in sandboxes {
        out = out
            .map(if one.slot.is_some() { 6 } else { 5 })
            .text("sandbox")
            .text(&one.sandbox);
        if let Some(slot) = one.slot {
            out = out.text("slot").unsigned(u64::from(slot));
        }
        out = out
            .text("pid")
            .unsigned(one.pid as u64)
            .text("alive")
            .boolean(one.alive);
        out = out
            .text("socket")
            .text(&one.socket)
            .text("scratch")
            .boolean(one.scratch);
    }
    out.finish()
}

pub fn diff(id: u64, page: &Page) -> Vec<u8> {
    let mut out = answer(id, 2)
        .text("more")
        .boolean(page.more)
        .text("entries")
        .array(page.changes.len());
    for change in &page.changes {
        out = out
            .map(3)
            .text("path")
            .bytes(&change.path)
            .text("kind")
            .text(change.kind)
            .text("size")
            .unsigned(change.size);
    }
    out.finish()
}

pub fn blobs_aborted() -> Vec<u8> {
    Writer::new()
        .map(1)
        .text("event")
        .text("blobs_aborted")
        .finish()
}

pub fn snapshot_taken(id: u64, taken: Taken) -> Vec<u8> {
    answer(id, 2)
        .text("sync_us")
        .unsigned(taken.sync.as_micros() as u64)
        .text("freeze_us")
        .unsigned(taken.frozen.as_micros() as u64)
        .finish()
}

pub fn packed(id: u64, report: &str) -> Vec<u8> {
    answer(id, 1).text("report").text(report).finish()
}

pub fn snapshots(id: u64, names: &[String]) -> Vec<u8> {
    names
        .iter()
        .fold(
            answer(id, 1).text("snapshots").array(names.len()),
            |out, name| out.text(name),
        )
        .finish()
}

pub fn exited(sandbox: &str, status: i32) -> Vec<u8> {
    Writer::new()
        .map(3)
        .text("event")
        .text("exited")
        .text("sandbox")
        .text(sandbox)
        .text("status")
        .signed(i64::from(status))
        .finish()
}

pub fn denied(denial: &Denial) -> Vec<u8> {
    Writer::new()
        .map(5)
        .text("event")
        .text("denied")
        .text("sandbox")
        .text(&denial.sandbox)
        .text("call")
        .text(&denial.call)
        .text("pid")
        .unsigned(u64::from(denial.pid))
        .text("last")
        .boolean(denial.last)
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A create request in which the field named writes itself differently.
    fn create(changed: &str, write: impl Fn(Writer) -> Writer) -> Result<Verb, Bad> {
        let fields = [
            "id",
            "verb",
            "sandbox",
            "layers",
            "hostname",
            "memory",
            "cpu_millis",
            "pids",
            "disk",
        ];
        let mut out = Writer::new().map(fields.len());
        for field in fields {
            out = out.text(field);
            out = match field {
                _ if field == changed => write(out),
                "verb" => out.text("create"),
                "sandbox" => out.text("sb-e1-00112233"),
                "layers" => out.array(1).text(&"ab".repeat(32)),
                "hostname" => out.text("box"),
                _ => out.unsigned(64 << 20),
            };
        }
        parse(&out.finish()).1
    }

    #[test]
    fn a_whole_request_is_understood() {
        assert!(matches!(create("", |out| out), Ok(Verb::Create(spec)) if spec.memory == 64 << 20));
    }

    #[test]
    fn hostile_arguments_are_named_and_refused() {
        let text = |field: &'static str, value: &'static str| create(field, |out| out.text(value));
        assert_eq!(text("sandbox", "sb-../../etc").unwrap_err(), Bad("sandbox"));
        assert_eq!(
            text("sandbox", "sb-e1-aaaa/bbb").unwrap_err(),
            Bad("sandbox")
        );
        assert_eq!(text("hostname", "a b").unwrap_err(), Bad("hostname"));
        assert_eq!(text("layers", "x").unwrap_err(), Bad("layers"));
        let number = |field: &'static str, value: u64| create(field, |out| out.unsigned(value));
        assert_eq!(number("memory", 0).unwrap_err(), Bad("memory"));
        assert_eq!(number("disk", u64::MAX).unwrap_err(), Bad("disk"));
        assert_eq!(number("pids", 0).unwrap_err(), Bad("pids"));
        assert_eq!(parse(b"\x93\x01").1.unwrap_err(), Bad("request"));
    }
}
