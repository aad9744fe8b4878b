//! Eventfds that block their writers, and such that never rest.

use std::os::fd::AsFd;

use anyhow::Result;
use nvme::NvmOpcode;
use vhost_blk::kind;
use vhost_blk::wire::request;
use zerocopy::IntoBytes;

use super::Context;
use crate::hostile::attacks::work::transfer;
use crate::hostile::client::nvme::Guest;
use crate::hostile::client::poison::{block, eventfd, full_semaphore, signal};
use crate::hostile::client::virtio::{AT_DATA, Disk, WRITE};
use crate::hostile::test_daemon::MEMORY_NSID;

pub(super) fn nvme(context: &Context) -> Result<()> {
    let mut guest = Guest::attach(&context.nvme())?;
    let vector = eventfd()?;
    guest.set_vectors(&[vector.as_fd(), vector.as_fd()])?;
    guest.enable()?;
    guest.create_queues(1, Some(1))?;
    guest.fill(1, &mut |at| {
        transfer(NvmOpcode::READ, MEMORY_NSID, u64::from(at) * 8, 8, 0)
    })?;
    block(&vector)?;
    context.did(1);
    guest.storm(1..=1, |count| {
        // A counter that was emptied is full again.
        let _ = block(&vector);
        context.did(count)
    })
}

pub(super) fn vhost(context: &Context) -> Result<()> {
    let mut disk = Disk::up(&context.vhost(), eventfd()?)?;
    disk.header(kind::IN, 0)?;
    disk.indirect(&[(AT_DATA, 4096)], WRITE)?;
    let call = disk.call.try_clone()?;
    block(&call)?;
    context.did(1);
    disk.storm(|count| {
        let _ = block(&call);
        context.did(count)
    })
}

pub(super) fn kick(context: &Context) -> Result<()> {
    let disk = Disk::up(&context.vhost(), eventfd()?)?;
    while context.did(1) {
        signal(&disk.kick)?;
    }
    Ok(())
}

/// Each read of such an eventfd takes one from its counter (eventfd(2)).
pub(super) fn semaphore(context: &Context) -> Result<()> {
    let endless = full_semaphore()?;
    let mut disk = Disk::up(&context.vhost(), eventfd()?)?;
    let index = 0u64;
    let fds = [endless.as_fd()];
    disk.raw
        .send(request::SET_VRING_KICK, index.as_bytes(), &fds)?;
    disk.raw.ask(request::GET_FEATURES)?;
    context.did(1);
    disk.header(kind::IN, 0)?;
    disk.indirect(&[(AT_DATA, 512)], WRITE)?;
    disk.storm(|count| context.did(count))
}
