//! Tests with real guests under QEMU, real servers and hostile clients, in one program: each
//! module tests one subject.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod ap;
mod bus_master;
mod chain;
mod clients;
mod cmb;
mod common;
mod completions;
mod deaths;
mod documents;
mod durability;
mod features;
mod file_copy;
mod firmware;
mod first;
mod formats;
mod hostile;
mod interrupts;
mod lifecycle;
mod manage;
mod metrics;
mod multipath;
mod namespaces;
mod nbd;
mod nbd_image;
mod nvme_tcp;
mod nvme_tcp_host;
mod placement;
mod power_cut;
mod protection;
mod qcow2;
mod qcow2_model;
mod rbd;
mod rbd_figures;
mod rbd_kills;
mod reservations;
mod stock_driver;
mod survival;
mod systemd;
mod ublk;
mod vfio;
mod vhost_blk;
mod vhost_migration;
mod zones;
