//! Virtual NVMe disks for virtual machines, served from userspace.
//!
//! This room is the program: command line, configuration, the worker's event loop, and the glue between a controller and
//! its vfio-user connection. Everything that a guest or a VMM sends is handled further down; here are only words for
//! people and the order in which things are started and ended.
#![deny(unsafe_code)]

mod balance;
mod bench;
mod bind;
mod cli;
mod control;
mod device;
mod devices;
mod direct;
mod eventfd;
mod front;
mod give_back;
mod identity;
mod info;
mod limits;
mod open;
mod peers;
#[cfg(test)]
mod readme;
mod rings;
mod serve;
mod signals;
mod sizes;
mod spec;
mod ublk;
mod usage;
mod vhost_blk;
mod volume_help;

use clap::Parser;
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    cli::init_logging(cli.log());
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may read it: that is no reason to end by a panic.
            let _ = writeln!(std::io::stderr(), "vnvme: {error:#}");
            match error.is::<usage::Usage>() {
                true => ExitCode::from(2),
                false => ExitCode::FAILURE,
            }
        }
    }
}
