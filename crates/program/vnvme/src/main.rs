//! Virtual NVMe disks for virtual machines, served from userspace.
//!
//! This crate is the program: its command line and what the commands print. Crate `config` has the
//! options and the configuration, crate `daemon` serves disks.
#![forbid(unsafe_code)]

mod bench;
mod bind;
mod cli;
mod devices;
mod discover;
#[cfg(test)]
mod documents;
mod info;
mod top;

use clap::{CommandFactory, Parser};
use config::usage_error::UsageError;
use daemon::confine::receiver;
use daemon::keep::{self, KeeperSession};
use daemon::log::stderr;
use daemon::serve::shutdown;
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
    let keeper = match KeeperSession::arrive() {
        Ok(keeper) => keeper,
        Err(error) => return failed(&error),
    };
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
    match cli.run(keeper) {
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
    if error.is::<UsageError>() {
        ExitCode::from(2)
    } else if error.is::<shutdown::NotDurable>() {
        ExitCode::from(shutdown::NOT_DURABLE)
    } else {
        ExitCode::FAILURE
    }
}
