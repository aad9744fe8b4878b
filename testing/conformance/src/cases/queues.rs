//! Creation and deletion of I/O queues (NVMe Base 2.1, 5.2.1 to 5.2.4).

use crate::bytes::u16_at;
use crate::case::{Need::*, cases};
use crate::host::{Host, admin, nvm};
use crate::info::ALL;
use crate::verdict::{Check, Expect, applies_if, require};
use nvme::{AdminOpcode, NvmOpcode, Status};
use test_host::Command;

cases! {
    queue_create_delete, ["1.4-b"], Always, Admin, "Base 2.1, 5.2.1 to 5.2.4",
        "a queue pair is created, works, is deleted, and can be created again";
    create_cq_identifier_zero, ["1.4-c"], Always, Admin, "Base 2.1, 5.2.1",
        "completion queue 0 is Invalid Queue Identifier";
    create_cq_identifier_too_large, ["1.4-d"], Always, Admin, "Base 2.1, 5.2.1",
        "a completion queue above the number of queues is Invalid Queue Identifier";
    create_cq_twice, ["1.4-e"], Always, Io, "Base 2.1, 5.2.1",
        "a completion queue that there is, is Invalid Queue Identifier";
    create_cq_size_zero, ["1.4-f"], Always, Admin, "Base 2.1, 5.2.1",
        "a completion queue of one entry is Invalid Queue Size";
    create_cq_too_large, ["1.4-g"], Always, Admin, "Base 2.1, 5.2.1",
        "a completion queue above CAP.MQES is Invalid Queue Size";
    create_cq_not_contiguous, ["1.4-h", "4.7"], If("CAP.CQR"), Admin, "Base 2.1, 5.2.1",
        "a completion queue that is not contiguous is Invalid Field in Command";
    create_cq_vector, ["1.4-i"], Always, Admin, "Base 2.1, 5.2.1",
        "an interrupt vector that is not there is Invalid Interrupt Vector";
    create_cq_offset, ["1.4-j"], Always, Admin, "Base 2.1, 5.2.1",
        "a completion queue that does not begin on a page is PRP Offset Invalid";
    create_sq_identifier_zero, ["1.4-k"], Always, Io, "Base 2.1, 5.2.2",
        "submission queue 0 is Invalid Queue Identifier";
    create_sq_identifier_too_large, ["1.4-l"], Always, Io, "Base 2.1, 5.2.2",
        "a submission queue above the number of queues is Invalid Queue Identifier";
    create_sq_twice, ["1.4-m"], Always, Io, "Base 2.1, 5.2.2",
        "a submission queue that there is, is Invalid Queue Identifier";
    create_sq_size_zero, ["1.4-n"], Always, Io, "Base 2.1, 5.2.2",
        "a submission queue of one entry is Invalid Queue Size";
    create_sq_too_large, ["1.4-o"], Always, Io, "Base 2.1, 5.2.2",
        "a submission queue above CAP.MQES is Invalid Queue Size";
    create_sq_not_contiguous, ["1.4-p", "4.7"], If("CAP.CQR"), Io, "Base 2.1, 5.2.2",
        "a submission queue that is not contiguous is Invalid Field in Command";
    create_sq_offset, ["1.4-q"], Always, Io, "Base 2.1, 5.2.2",
        "a submission queue that does not begin on a page is PRP Offset Invalid";
    create_sq_without_cq, ["1.4-r"], Always, Admin, "Base 2.1, 5.2.2",
        "a submission queue whose completion queue is missing is Completion Queue Invalid";
    create_sq_cq_out_of_range, ["1.4-s"], Always, Admin, "Base 2.1, 5.2.2",
        "a completion queue identifier of 0, or above the number of queues, is Invalid Queue \
         Identifier";
    create_sq_priorities, ["1.4-t"], Always, Io, "Base 2.1, 5.2.2",
        "every priority class is taken where weighted round robin is not selected";
    delete_cq_in_use, ["1.4-u"], Always, Io, "Base 2.1, 5.2.3",
        "deleting a completion queue before its submission queue is Invalid Queue Deletion";
    delete_cq_invalid, ["1.4-v"], Always, Io, "Base 2.1, 5.2.3",
        "deleting completion queue 0, or one that is not there, is Invalid Queue Identifier";
    delete_sq_invalid, ["1.4-w"], Always, Io, "Base 2.1, 5.2.4",
        "deleting submission queue 0, or one that is not there, is Invalid Queue Identifier";
    delete_sq_with_commands, ["1.4-x"], Always, Io, "Base 2.1, 5.2.4",
        "commands of a submission queue that is deleted complete before the deletion does";
    queues_share_completion_queue, ["1.4-y"], Always, Io, "Base 2.1, 3.3.1",
        "several submission queues complete to one completion queue";
    queues_all, ["1.4-z"], Always, Admin, "Base 2.1, 5.1.25.2.1, 5.2",
        "as many queue pairs as were granted can be made, and all of them work";
    queue_largest, ["4.8"], Always, Admin, "Base 2.1, 3.1.4.1",
        "a queue of CAP.MQES entries works";
}

/// Returns the numbers of I/O submission and completion queues that Set Features has granted.
fn granted(host: &mut Host) -> Check<(u32, u32)> {
    let entry = host.set_feature(0x07, 0, 0xfffe_fffe)?;
    entry.succeeds("Number of Queues")?;
    let told = entry.dw0();
    Ok(((told & 0xffff) + 1, (told >> 16) + 1))
}

/// Returns the numbers of I/O queues that Get Features reports while queues exist.
fn told(host: &mut Host) -> Check<(u32, u32)> {
    let told = host.get_feature(0x07, 0, 0, 0)?.dw0();
    Ok(((told & 0xffff) + 1, (told >> 16) + 1))
}

fn read_some(host: &mut Host, qid: u16) -> Check {
    let ns = host.namespace()?;
    let at = host.alloc(4096)?;
    let blocks = 4096 / ns.block;
    let command = host.rw_command(NvmOpcode::READ, &ns, 0, blocks.max(1), at)?;
    host.run(qid, command)?
        .succeeds(&format!("a read by queue {qid}"))
}

fn delete_sq(qid: u16) -> Command {
    admin(AdminOpcode::DELETE_IO_SQ, 0).dw(10, qid.into())
}

fn delete_cq(qid: u16) -> Command {
    admin(AdminOpcode::DELETE_IO_CQ, 0).dw(10, qid.into())
}

fn queue_create_delete(host: &mut Host) -> Check {
    for _ in 0..3 {
        let entries = host.io_entries();
        host.create_pair(1, entries)?;
        read_some(host, 1)?;
        host.admin(delete_sq(1))?
            .succeeds("Delete I/O Submission Queue")?;
        host.admin(delete_cq(1))?
            .succeeds("Delete I/O Completion Queue")?;
        host.forget_sq(1);
    }
    Ok(())
}

/// Returns dword 10 of a Create Queue command, with the size and identifier of the queue.
fn dw10(qid: u32, entries: u32) -> u32 {
    entries.wrapping_sub(1) << 16 | qid & 0xffff
}

fn cq(host: &mut Host) -> Check<Command> {
    Ok(host.pair_commands(2, 16)?.0)
}

fn sq(host: &mut Host) -> Check<Command> {
    // Uses completion queue 1, which exists.
    Ok(host.pair_commands(2, 16)?.1.dw(11, 1 << 16 | 1))
}

fn create_cq_identifier_zero(host: &mut Host) -> Check {
    let command = cq(host)?.dw(10, dw10(0, 16));
    host.admin(command)?
        .refused(Status::INVALID_QUEUE_IDENTIFIER, "completion queue 0")
}

fn create_cq_identifier_too_large(host: &mut Host) -> Check {
    let (_, most) = granted(host)?;
    for qid in [most + 1, 0xffff] {
        if qid <= most {
            continue;
        }
        let command = cq(host)?.dw(10, dw10(qid, 16));
        host.admin(command)?.refused(
            Status::INVALID_QUEUE_IDENTIFIER,
            &format!("completion queue {qid} of {most}"),
        )?;
    }
    Ok(())
}

fn create_cq_twice(host: &mut Host) -> Check {
    let command = cq(host)?.dw(10, dw10(1, 16));
    host.admin(command)?
        .refused(Status::INVALID_QUEUE_IDENTIFIER, "completion queue 1 again")?;
    read_some(host, 1)
}

fn create_cq_size_zero(host: &mut Host) -> Check {
    let command = cq(host)?.dw(10, dw10(2, 1));
    host.admin(command)?.refused(
        Status::INVALID_QUEUE_SIZE,
        "a completion queue of one entry",
    )
}

fn create_cq_too_large(host: &mut Host) -> Check {
    let most = u32::from(host.cap.mqes_z()) + 1;
    applies_if(
        most < 0x1_0000,
        "CAP.MQES is the largest size that there is",
    )?;
    for entries in [most + 1, 0x1_0000] {
        let command = cq(host)?.dw(10, dw10(2, entries));
        host.admin(command)?.refused(
            Status::INVALID_QUEUE_SIZE,
            &format!("a completion queue of {entries} entries, {most} are possible"),
        )?;
    }
    Ok(())
}

fn contiguous(host: &mut Host) -> Check {
    applies_if(host.cap.cqr(), "CAP.CQR is 0")
}

fn create_cq_not_contiguous(host: &mut Host) -> Check {
    contiguous(host)?;
    let command = cq(host)?.dw(11, 0);
    host.admin(command)?
        .refused(Status::INVALID_FIELD, "a completion queue with PC 0")
}

/// Returns the number of MSI-X vectors, or MSI vectors, of the controller.
fn vectors(host: &mut Host) -> Check<u32> {
    for (id, at) in super::pci::capabilities(host)? {
        let control = u16_at(&host.read_config::<4>(at)?, 2);
        match id {
            0x11 => return Ok(u32::from(control & 0x7ff) + 1),
            0x05 => return Ok(1 << (control >> 1 & 7)),
            _ => {}
        }
    }
    crate::verdict::not_applicable("there is neither MSI nor MSI-X")
}

fn create_cq_vector(host: &mut Host) -> Check {
    let count = vectors(host)?;
    for vector in [count, 0xffff] {
        let command = cq(host)?.dw(11, vector << 16 | 3);
        host.admin(command)?.refused(
            Status::INVALID_INTERRUPT_VECTOR,
            &format!("vector {vector} of {count}"),
        )?;
    }
    Ok(())
}

fn create_cq_offset(host: &mut Host) -> Check {
    let command = cq(host)?;
    let command = command.prp(command.prp1() + 64, 0);
    host.admin(command)?.refused(
        Status::PRP_OFFSET_INVALID,
        "a completion queue within a page",
    )
}

fn create_sq_identifier_zero(host: &mut Host) -> Check {
    let command = sq(host)?.dw(10, dw10(0, 16));
    host.admin(command)?
        .refused(Status::INVALID_QUEUE_IDENTIFIER, "submission queue 0")
}

fn create_sq_identifier_too_large(host: &mut Host) -> Check {
    let (most, _) = told(host)?;
    for qid in [most + 1, 0xffff] {
        let command = sq(host)?.dw(10, dw10(qid, 16));
        host.admin(command)?.refused(
            Status::INVALID_QUEUE_IDENTIFIER,
            &format!("submission queue {qid} of {most}"),
        )?;
    }
    Ok(())
}

fn create_sq_twice(host: &mut Host) -> Check {
    let command = sq(host)?.dw(10, dw10(1, 16));
    host.admin(command)?
        .refused(Status::INVALID_QUEUE_IDENTIFIER, "submission queue 1 again")?;
    read_some(host, 1)
}

fn create_sq_size_zero(host: &mut Host) -> Check {
    let command = sq(host)?.dw(10, dw10(2, 1));
    host.admin(command)?.refused(
        Status::INVALID_QUEUE_SIZE,
        "a submission queue of one entry",
    )
}

fn create_sq_too_large(host: &mut Host) -> Check {
    let most = u32::from(host.cap.mqes_z()) + 1;
    applies_if(
        most < 0x1_0000,
        "CAP.MQES is the largest size that there is",
    )?;
    let command = sq(host)?.dw(10, dw10(2, most + 1));
    host.admin(command)?.refused(
        Status::INVALID_QUEUE_SIZE,
        &format!(
            "a submission queue of {} entries, {most} are possible",
            most + 1
        ),
    )
}

fn create_sq_not_contiguous(host: &mut Host) -> Check {
    contiguous(host)?;
    let command = sq(host)?.dw(11, 1 << 16);
    host.admin(command)?
        .refused(Status::INVALID_FIELD, "a submission queue with PC 0")
}

fn create_sq_offset(host: &mut Host) -> Check {
    let command = sq(host)?;
    let command = command.prp(command.prp1() + 64, 0);
    host.admin(command)?.refused(
        Status::PRP_OFFSET_INVALID,
        "a submission queue within a page",
    )
}

fn create_sq_without_cq(host: &mut Host) -> Check {
    let (_, most) = granted(host)?;
    let missing = most.min(2);
    let command = sq(host)?.dw(11, missing << 16 | 1);
    host.admin(command)?.refused(
        Status::COMPLETION_QUEUE_INVALID,
        &format!("a submission queue of completion queue {missing}, which is not there"),
    )
}

fn create_sq_cq_out_of_range(host: &mut Host) -> Check {
    let (_, most) = granted(host)?;
    for cqid in [0, most + 1, 0xffff] {
        let command = sq(host)?.dw(11, cqid << 16 | 1);
        host.admin(command)?.refused(
            Status::INVALID_QUEUE_IDENTIFIER,
            &format!("a submission queue of completion queue {cqid}, there are {most}"),
        )?;
    }
    Ok(())
}

fn create_sq_priorities(host: &mut Host) -> Check {
    let (most, _) = told(host)?;
    applies_if(most >= 2, "there is one I/O queue only")?;
    for priority in 0..4u32 {
        let command = sq(host)?.dw(11, 1 << 16 | priority << 1 | 1);
        host.admin(command)?
            .succeeds(&format!("priority class {priority}"))?;
        host.admin(delete_sq(2))?
            .succeeds("Delete I/O Submission Queue")?;
    }
    Ok(())
}

fn delete_cq_in_use(host: &mut Host) -> Check {
    host.admin(delete_cq(1))?.refused(
        Status::INVALID_QUEUE_DELETION,
        "a completion queue whose submission queue is there",
    )?;
    read_some(host, 1)
}

fn delete_cq_invalid(host: &mut Host) -> Check {
    for qid in [0, 2, 0xffff] {
        host.admin(delete_cq(qid))?.refused(
            Status::INVALID_QUEUE_IDENTIFIER,
            &format!("completion queue {qid}"),
        )?;
    }
    Ok(())
}

fn delete_sq_invalid(host: &mut Host) -> Check {
    for qid in [0, 2, 0xffff] {
        host.admin(delete_sq(qid))?.refused(
            Status::INVALID_QUEUE_IDENTIFIER,
            &format!("submission queue {qid}"),
        )?;
    }
    Ok(())
}

fn delete_sq_with_commands(host: &mut Host) -> Check {
    let ns = host.namespace()?;
    let at = host.alloc(64 << 10)?;
    let command = host.rw_command(NvmOpcode::READ, &ns, 0, (64 << 10) / ns.block, at)?;
    let count = host.io_entries() - 1;
    for _ in 0..count {
        host.put_command(1, command)?;
    }
    host.ring_tail(1)?;
    // Completions are taken while the deletion waits for them, and after it there are no more.
    let cid = host.submit(0, delete_sq(1))?;
    host.wait_for(0, cid)?
        .succeeds("Delete I/O Submission Queue under load")?;
    let mut completed = 0;
    while let Some(entry) = host.poll_quietly(1)? {
        entry.expect_one(
            &[Status::SUCCESS, Status::ABORTED_SQ_DELETION],
            "a command of the queue that is deleted",
        )?;
        completed += 1;
    }
    require!(
        completed <= count,
        "{completed} completions of {count} commands"
    );
    std::thread::sleep(crate::host::QUIET_TIME);
    require!(
        host.poll_quietly(1)?.is_none(),
        "a command completed after its queue was deleted"
    );
    host.admin(delete_cq(1))?
        .succeeds("Delete I/O Completion Queue")
}

fn queues_share_completion_queue(host: &mut Host) -> Check {
    let (most, _) = told(host)?;
    applies_if(most >= 3, "there are fewer than three I/O queues")?;
    for qid in [2u16, 3] {
        let command = sq(host)?.dw(10, dw10(qid.into(), 16));
        host.admin(command)?
            .succeeds(&format!("submission queue {qid} of completion queue 1"))?;
        host.know_sq(qid, command.prp1(), 16, 1);
    }
    for round in 0..20 {
        for qid in [1u16, 2, 3] {
            host.submit(qid, nvm(NvmOpcode::FLUSH, 1))?;
        }
        let mut seen = [false; 3];
        for _ in 0..3 {
            let entry = host.next(1)?;
            if let Some(seen) = seen.get_mut(usize::from(entry.sqid()).wrapping_sub(1)) {
                *seen = true;
            }
        }
        require!(
            seen == [true; 3],
            "round {round}: not every queue has completed: {seen:?}"
        );
    }
    Ok(())
}

fn queues_all(host: &mut Host) -> Check {
    let (sqs, cqs) = granted(host)?;
    let count = sqs.min(cqs).min(128) as u16;
    for qid in 1..=count {
        host.create_pair(qid, 8.min(host.io_entries()))?;
    }
    let ns = host.namespace()?;
    for qid in (1..=count).rev() {
        let flush = nvm(NvmOpcode::FLUSH, ns.nsid);
        host.run(qid, flush)?
            .succeeds(&format!("a Flush by queue {qid}"))?;
    }
    let flush = nvm(NvmOpcode::FLUSH, ALL);
    host.run(count, flush)?;
    Ok(())
}

fn queue_largest(host: &mut Host) -> Check {
    let entries = host.cap.mqes_z().saturating_add(1);
    host.create_pair(1, entries)?;
    let ns = host.namespace()?;
    let flush = nvm(NvmOpcode::FLUSH, ns.nsid);
    let count = entries - 1;
    for _ in 0..2 {
        for _ in 0..count {
            host.put_command(1, flush)?;
        }
        host.ring_tail(1)?;
        for _ in 0..count {
            host.next(1)?.succeeds("a Flush in a full queue")?;
        }
    }
    Ok(())
}
