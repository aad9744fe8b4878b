//! Disks of many kinds in one guest, each behind a daemon of its own: the checks are those of the
//! modules, which share a boot.

use crate::bus_master::BusMaster;
use crate::chain::Chain;
use crate::common::{in_one_guest, newer_kernel};
use crate::interrupts::Doorbells;
use crate::placement::Placed;
use crate::protection::{Pieces, Protected};
use crate::stock_driver::Passthrough;
use crate::zones::{Areas, ZonedDisk};
use anyhow::Result;
use harness::Guest;
use harness::progress::skip;

#[test]
fn disks_of_every_kind_in_debians_kernel() -> Result<()> {
    let parts = [
        Protected::serve()?,
        Placed::serve()?,
        ZonedDisk::serve()?,
        Areas::serve()?,
        Chain::serve()?,
        BusMaster::serve()?,
        Doorbells::without_shadows()?,
        Doorbells::mapped()?,
        Doorbells::of_a_sleeper()?,
    ];
    in_one_guest(|| Guest::builder("features"), parts)
}

/// Linux 7.x describes buffers of user space by SGLs, and metadata, too.
#[test]
fn disks_of_several_kinds_in_a_newer_kernel() -> Result<()> {
    let Some(kernel) = newer_kernel() else {
        let reason = "no newer kernel is given (VNVME_KERNEL)";
        skip("features::disks_of_several_kinds_in_a_newer_kernel", reason);
        return Ok(());
    };
    let parts = [Passthrough::serve()?, Pieces::serve()?, BusMaster::serve()?];
    in_one_guest(|| Guest::builder("newer").kernel(&kernel), parts)
}
