//! The program from outside: its command line, its signals and its sockets, with clients that
//! behave like those that exist, and clients that misbehave.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;

mod access;
mod bad_messages;
mod bench;
mod boot;
mod bus_master;
mod clients;
mod cmb;
mod conformance;
mod connects;
mod control;
mod devices;
mod direct;
mod disks;
mod errors;
mod failure_domains;
mod fairness;
mod footprint;
mod formats;
mod hanging;
mod idle;
mod interrupts;
mod keeper;
mod lifecycle;
mod limits;
mod manage;
mod memory;
mod metrics;
mod mistakes;
mod notify;
mod nvme_tcp;
mod options;
mod package;
mod pinned;
mod pool;
mod quotas;
mod reload;
mod runtime_changes;
mod sandbox;
mod service;
mod sleep;
mod slices;
mod sockets;
mod spread;
mod startup;
mod statuses;
mod storage_faults;
mod subsystem;
mod throttle;
mod top;
mod vhost_blk;
mod zones;
