//! dsec-spawner: every privileged act of the platform, behind one socket with a few verbs (`docs/wire.md`). Root, small, and no more trusting of the
//! service that calls it than it must be: it builds every path and finds every process itself.

mod cgroup;
mod changes;
mod child;
mod claims;
mod covers;
mod create;
mod denials;
mod doctor;
mod endings;
mod fuse;
mod keeper;
mod kill;
mod layers;
mod loops;
mod node;
mod options;
mod registry;
mod scratch;
mod seccomp;
mod server;
mod snapshot;
mod spares;
mod supervise;
mod sweep;
mod sysapi;
#[cfg(test)]
mod testing;
mod verbs;

use options::Command;

fn main() {
    let (command, options) = match options::parse(std::env::args_os().skip(1)) {
        Ok(parsed) => parsed,
        Err(message) => {
            eprintln!("dsec-spawner: {message}");
            std::process::exit(2);
        }
    };
    let result = match command {
        Command::Help => {
            print!("{}", options::HELP);
            Ok(0)
        }
        Command::Serve => server::run(&options)
            .map(|()| 0)
            .map_err(|error| error.to_string()),
        Command::Keep => keeper::run(options.absence_s),
        Command::Sweep => sweep::run(&options),
        Command::Supervise => supervise::run(&options),
        Command::Doctor => doctor::run(&options),
    };
    match result {
        Ok(code) => std::process::exit(code),
        Err(message) => {
            eprintln!("dsec-spawner: {message}");
            std::process::exit(1);
        }
    }
}
