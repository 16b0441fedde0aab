//! What travels between the parts: the frame codec, msgpack values, and the maps that frames carry. `docs/wire.md` is the contract.
//!
//! This crate knows bytes only, the sockets that they travel on (`passing`), and what the parts' processes have in common (`capabilities`, `process`): no
//! clock, no policy. It uses no derive macros, because a static build without `--target`
//! can't make procedural macros.

pub mod capabilities;
pub mod digest;
pub mod frame;
pub mod message;
pub mod passing;
pub mod process;
pub mod value;
