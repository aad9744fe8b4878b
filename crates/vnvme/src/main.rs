//! Virtual NVMe disks for virtual machines, served from userspace.
//!
//! This crate is the program: command line, configuration, the front-ends of its workers, and the
//! connection of a controller to its vfio-user socket. Requests of guests and VMMs are handled in
//! the crates below; this one contains user interfaces and the order of start and end.
#![forbid(unsafe_code)]

mod access;
mod alarms;
mod ana;
mod api;
mod balance;
mod bench;
mod bind;
mod check;
mod check_files;
mod cli;
mod config;
mod confine;
mod counters;
mod descriptions;
mod descriptors;
mod device;
mod devices;
mod direct;
mod discover;
mod discovery;
#[cfg(test)]
mod error_texts;
mod formats;
mod front;
mod guarded_list;
mod heap;
mod host_keys;
mod identity;
mod info;
mod inherited;
mod irq_eventfd;
mod keep;
mod limits;
mod log;
mod log_format;
mod manage;
mod metadata;
mod notify;
mod on_error;
mod open;
mod options;
mod origin;
mod parts;
mod path_check;
mod peers;
mod placement;
mod pools;
mod prepare;
#[cfg(test)]
mod readme;
mod receiver;
mod record;
mod registry;
mod removal;
mod rings;
mod scrape;
mod serve;
mod settings;
mod shutdown;
mod signals;
mod sizes;
mod snapshot;
mod socket_maker;
mod sockets;
mod spec;
mod stderr;
mod subsystems;
mod table_file;
mod tcp;
mod top;
mod ublk;
mod usage_error;
mod vhost_blk;
mod volume_help;
mod watch;
mod worker_context;
mod zones;

use clap::{CommandFactory, Parser};
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args_os().skip(1).eq(keep::VERSIONS) {
        let said = output::line(format_args!("{}", keep::Versions::own()));
        return said.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    if std::env::args_os().skip(1).eq(keep::LAST) {
        return keep::last();
    }
    if let Some(wanted) = keep::wanted(std::env::args_os().skip(1)) {
        return keep::run(&wanted);
    }
    match keep::arrive() {
        Ok(given) => inherited::take(given),
        Err(error) => return failed(&error),
    }
    if let Some(role) = receiver::Role::wanted(std::env::args_os().skip(1)) {
        return match role.run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error),
        };
    }
    if let Some(args) = bench::suites::wanted(std::env::args_os().skip(1)) {
        return match bench::suites::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error),
        };
    }
    // For a shell's completion request, only completions are printed.
    let complete = clap_complete::CompleteEnv::with_factory(cli::Cli::command);
    match complete.try_complete(std::env::args_os(), None) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => {}
        Err(error) => {
            let _ = error.print();
            return ExitCode::FAILURE;
        }
    }
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        // Help, or an error of the command line.
        Err(error) => {
            let error = cli::explain(error);
            return match error.print() {
                Err(closed) if closed.kind() == std::io::ErrorKind::BrokenPipe => {
                    output::end_quietly()
                }
                _ => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)),
            };
        }
    };
    cli::init_logging(cli.log(), cli.log_format());
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// Prints an error, and returns the exit code.
fn failed(error: &anyhow::Error) -> ExitCode {
    let closed = error.downcast_ref::<output::OutputError>();
    if closed.is_some_and(output::OutputError::is_closed) {
        return output::end_quietly();
    }
    stderr::say(format_args!("{error:#}"));
    if error.is::<usage_error::UsageError>() {
        ExitCode::from(2)
    } else if error.is::<shutdown::NotDurable>() {
        ExitCode::from(shutdown::NOT_DURABLE)
    } else {
        ExitCode::FAILURE
    }
}
