//! Submission and completion queues as rings (NVMe Base 2.1, 3.3.3, 4.1, 4.2).

use crate::bytes::u16_at;
use crate::case::{Need::*, cases};
use crate::host::{Host, PAGE, QUIET_TIME, admin, nvm};
use crate::verdict::{Check, Expect, require, same};
use nvme::{AdminOpcode, NvmOpcode as Op};

cases! {
    completion_entry, ["5.2"], Always, Io, "Base 2.1, 4.2.1",
        "a completion names queue and command, and its reserved dword is zero";
    completion_status_fields, ["5.3"], Always, Io, "Base 2.1, 4.2.3",
        "status of success is all zero; M is set only with an entry in the error log";
    ring_wraps, ["5-d"], Always, Admin, "Base 2.1, 3.3.3.1, 4.2.4",
        "a queue pair of few entries goes around many times: the phase inverts, SQHD follows";
    ring_sizes_differ, ["5-d"], Always, Admin, "Base 2.1, 3.3.3.1",
        "submission and completion queue of different sizes go around by themselves";
    ring_full, ["5-e"], Always, Io, "Base 2.1, 3.3.3.1",
        "a submission queue filled to its last entry but one completes entirely";
    ring_completion_full, ["5-e"], Always, Admin, "Base 2.1, 3.3.3.1",
        "a full completion queue is not overwritten, and goes on when its head is told";
    ring_head_in_steps, [], Always, Admin, "Base 2.1, 3.3.3.1",
        "completions come one by one as the head moves one by one";
    ring_tail_unchanged, [], Always, Io, "PCIe Transport 1.1, 3.1.2.1",
        "a doorbell written again with the same tail fetches nothing";
    command_identifiers, ["5-f"], Always, Io, "Base 2.1, 4.1.1",
        "any command identifier is returned as it is, and the same ones may be used in two queues";
    commands_out_of_order, ["5-f"], Always, Io, "Base 2.1, 3.3.3.1.1",
        "many commands at one time each complete once, in whatever order";
    command_read_once, [], Always, Io, "Base 2.1, 3.3.3.1",
        "an entry below SQHD may be overwritten: its command is not fetched again";
    doorbell_before_enable, [], Always, Disabled, "PCIe Transport 1.1, 3.1.2",
        "a doorbell of the disabled controller does nothing";
}

fn flush(host: &mut Host) -> Check<test_host::Command> {
    let ns = host.namespace()?;
    Ok(nvm(Op::FLUSH, ns.nsid))
}

fn completion_entry(host: &mut Host) -> Check {
    let command = flush(host)?;
    let cid = host.submit(1, command)?;
    let entry = host.wait_for(1, cid)?;
    entry.succeeds("Flush")?;
    same!(entry.sqid(), 1u16, "SQID");
    same!(entry.cid(), cid, "CID");
    same!(
        entry.dw0(),
        0u32,
        "dword 0 of a command that returns nothing there"
    );
    same!(entry.dw1(), 0u32, "dword 1, which is reserved");
    Ok(())
}

fn completion_status_fields(host: &mut Host) -> Check {
    let command = flush(host)?;
    let entry = host.io(command)?;
    same!(entry.status_bits(), 0u16, "status of success");
    let wrong = nvm(Op::READ, 0);
    let before = crate::bytes::u64_at(&host.log(1, 64)?, 0);
    let cid = host.submit(1, wrong)?;
    let entry = host.wait_for(1, cid)?;
    entry.fails("a read of NSID 0")?;
    if entry.status().more() {
        let log = host.log(1, 64)?;
        require!(
            crate::bytes::u64_at(&log, 0) > before && u16_at(&log, 10) == cid,
            "M is set, and the error log has no entry of the command"
        );
    }
    Ok(())
}

fn ring_wraps(host: &mut Host) -> Check {
    host.create_pair(1, 3)?;
    let command = flush(host)?;
    // The phase is looked at by the host for each, SQHD as well.
    for round in 0..50u16 {
        let entry = host.io(command)?;
        entry.succeeds("Flush")?;
        same!(entry.sqhd(), (round + 1) % 3, "SQHD of command {round}");
    }
    Ok(())
}

/// Creates queue pair 1 with different numbers of entries in its two queues.
pub(super) fn uneven(host: &mut Host, sq_entries: u16, cq_entries: u16) -> Check {
    let (cq, sq) = host.pair_commands(1, sq_entries.max(cq_entries))?;
    host.admin(cq.dw(10, u32::from(cq_entries - 1) << 16 | 1))?
        .succeeds("completion queue 1")?;
    host.know_cq(1, cq.prp1(), cq_entries);
    host.admin(sq.dw(10, u32::from(sq_entries - 1) << 16 | 1))?
        .succeeds("submission queue 1")?;
    host.know_sq(1, sq.prp1(), sq_entries, 1);
    Ok(())
}

fn ring_sizes_differ(host: &mut Host) -> Check {
    uneven(host, 5, 13)?;
    let command = flush(host)?;
    for _ in 0..100 {
        host.io(command)?.succeeds("Flush")?;
    }
    Ok(())
}

fn ring_full(host: &mut Host) -> Check {
    let command = flush(host)?;
    let count = host.io_entries() - 1;
    for round in 0..20 {
        for _ in 0..count {
            host.put_command(1, command)?;
        }
        host.ring_tail(1)?;
        for _ in 0..count {
            host.next(1)?
                .succeeds(&format!("Flush in a full queue, round {round}"))?;
        }
    }
    host.stays_quiet(1, "an empty queue")
}

fn ring_completion_full(host: &mut Host) -> Check {
    uneven(host, 16, 4)?;
    let command = flush(host)?;
    for _ in 0..12 {
        host.put_command(1, command)?;
    }
    host.ring_tail(1)?;
    std::thread::sleep(QUIET_TIME);
    // Three fit into four entries; the fourth stays free until the head is written.
    let mut taken = 0;
    while host.poll_quietly(1)?.is_some() {
        taken += 1;
        require!(
            taken <= 3,
            "{taken} completions are in a queue of four entries"
        );
    }
    same!(taken as u32, 3u32, "completions before the head was told");
    std::thread::sleep(QUIET_TIME);
    require!(
        host.poll_quietly(1)?.is_none(),
        "a completion before the head was told"
    );
    host.ring_head(1)?;
    for _ in 0..9 {
        host.next(1)?.succeeds("a Flush that had to wait")?;
    }
    host.stays_quiet(1, "an empty queue")
}

fn ring_head_in_steps(host: &mut Host) -> Check {
    uneven(host, 16, 2)?;
    let command = flush(host)?;
    for _ in 0..10 {
        host.put_command(1, command)?;
    }
    host.ring_tail(1)?;
    for step in 0..10 {
        std::thread::sleep(std::time::Duration::from_millis(2));
        let entry = host.next(1)?;
        entry.succeeds(&format!("Flush {step}"))?;
    }
    Ok(())
}

fn ring_tail_unchanged(host: &mut Host) -> Check {
    let command = flush(host)?;
    host.io(command)?.succeeds("Flush")?;
    for _ in 0..5 {
        host.ring_tail(1)?;
    }
    host.stays_quiet(1, "a tail that has not moved")
}

fn command_identifiers(host: &mut Host) -> Check {
    let command = flush(host)?;
    for cid in [0u16, 1, 0x7fff, 0x8000, 0xfffe] {
        host.put_command_as(1, command, cid)?;
        host.ring_tail(1)?;
        host.wait_for(1, cid)?
            .succeeds(&format!("a command with identifier {cid:#x}"))?;
    }
    // A command with this identifier waits in the admin queue meanwhile.
    host.put_command_as(0, admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0), 0x4242)?;
    host.ring_tail(0)?;
    host.put_command_as(1, command, 0x4242)?;
    host.ring_tail(1)?;
    host.wait_for(1, 0x4242)?
        .succeeds("an identifier that another queue uses")
}

fn commands_out_of_order(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let at = host.alloc(64 << 10)?;
    let count = host.io_entries() - 1;
    let large = (64 << 10) / ns.block;
    for _ in 0..10 {
        let mut sent = Vec::new();
        for n in 0..u64::from(count) {
            let command = match n % 4 {
                0 => host.rw_command(Op::READ, &ns, n * large, large, at)?,
                1 => nvm(Op::FLUSH, ns.nsid),
                2 => host.rw_command(Op::READ, &ns, n, 1, at)?,
                // A command that fails at once.
                _ => nvm(Op::READ, 0),
            };
            sent.push((n, host.put_command(1, command)?));
        }
        host.ring_tail(1)?;
        for (n, cid) in sent {
            let entry = host.wait_for(1, cid)?;
            if n % 4 == 3 {
                entry.fails("a read of NSID 0 among others")?;
            } else if n * large + large <= ns.blocks {
                entry.succeeds("a command among others")?;
            }
        }
    }
    host.stays_quiet(1, "an empty queue")
}

fn command_read_once(host: &mut Host) -> Check {
    let command = flush(host)?;
    let cid = host.submit(1, command)?;
    host.wait_for(1, cid)?.succeeds("Flush")?;
    // A new command is written to the next entry; the previous one is not fetched again.
    for _ in 0..3 {
        host.io(command)?.succeeds("Flush")?;
    }
    host.stays_quiet(1, "entries that were fetched")
}

fn doorbell_before_enable(host: &mut Host) -> Check {
    host.ring(0, false, 1)?;
    host.ring(1, false, 1)?;
    host.ring(0, true, 1)?;
    host.enable()?;
    host.stays_quiet(0, "a controller that was just enabled")?;
    let at = host.alloc(PAGE)?;
    host.admin(admin(AdminOpcode::IDENTIFY, 0).prp(at, 0).dw(10, 1))?
        .succeeds("the first command")
}
