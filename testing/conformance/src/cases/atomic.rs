//! Atomicity (NVM Command Set 1.1, 2.1.4).

use crate::bytes::u16_at;
use crate::case::{Need::*, cases};
use crate::host::Host;
use crate::verdict::{Check, Expect, require};
use nvme::NvmOpcode;

cases! {
    atomic_writes, ["2.9-a"], Always, Io, "NVM Command Set 1.1, 2.1.4.1",
        "of two writes at one time that overlap within AWUN, each block range is one or the other";
    atomic_read_while_written, ["2.9-b"], Always, Io, "NVM Command Set 1.1, 2.1.4.1",
        "a read at the time of a write within AWUN has all of the old data or all of the new";
}

/// Returns the number of blocks that the controller writes atomically, at most 64.
fn unit(host: &mut Host) -> Check<u64> {
    Ok((u64::from(u16_at(&host.controller()?.0, 526)) + 1).min(64))
}

fn atomic_writes(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let unit = unit(host)?;
    let len = (unit * ns.block) as usize;
    let (a, b) = (host.alloc(len as u64)?, host.alloc(len as u64)?);
    host.put(a, &vec![0xaa; len])?;
    host.put(b, &vec![0xbb; len])?;
    let first = host.rw_command(NvmOpcode::WRITE, &ns, 3000, unit, a)?;
    let second = host.rw_command(NvmOpcode::WRITE, &ns, 3000, unit, b)?;
    let free = host.alloc(len as u64)?;
    let read = host.rw_command(NvmOpcode::READ, &ns, 3000, unit, free)?;
    for round in 0..100 {
        for command in [first, second] {
            host.put_command(1, command)?;
        }
        host.ring_tail(1)?;
        for _ in 0..2 {
            host.next(1)?.succeeds("a write")?;
        }
        host.io(read)?.succeeds("a read")?;
        let found = host.get(free, len)?;
        let byte = found.first().copied().unwrap_or(0);
        require!(
            (byte == 0xaa || byte == 0xbb) && found.iter().all(|b| *b == byte),
            "round {round}: {unit} blocks are of both writes"
        );
    }
    Ok(())
}

fn atomic_read_while_written(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let unit = unit(host)?;
    let len = (unit * ns.block) as usize;
    let (a, b) = (host.alloc(len as u64)?, host.alloc(len as u64)?);
    host.put(a, &vec![0xaa; len])?;
    host.put(b, &vec![0xbb; len])?;
    let free = host.alloc(len as u64)?;
    host.write(&ns, 3100, &vec![0xaa; len])?;
    for round in 0..100 {
        let from = if round % 2 == 0 { b } else { a };
        let write = host.rw_command(NvmOpcode::WRITE, &ns, 3100, unit, from)?;
        let read = host.rw_command(NvmOpcode::READ, &ns, 3100, unit, free)?;
        for command in [write, read] {
            host.put_command(1, command)?;
        }
        host.ring_tail(1)?;
        for _ in 0..2 {
            host.next(1)?.succeeds("a write or a read")?;
        }
        let found = host.get(free, len)?;
        let byte = found.first().copied().unwrap_or(0);
        require!(
            (byte == 0xaa || byte == 0xbb) && found.iter().all(|b| *b == byte),
            "round {round}: {unit} blocks are of old and new data"
        );
    }
    Ok(())
}
