//! Abort (NVMe Base 2.1, 5.1.1).

use crate::case::{Need::*, cases};
use crate::host::{Host, admin};
use crate::verdict::{Check, Expect, require, same};
use nvme::{AdminOpcode, Status};

cases! {
    abort_event_request, ["1.5-a"], Always, Admin, "Base 2.1, 5.1.1",
        "a command that waits is aborted: it completes first, as Command Abort Requested, and bit \
         0 of the Abort command's result is 0";
    abort_unknown_command, ["1.5-b"], Always, Io, "Base 2.1, 5.1.1",
        "the abort of a command that is not there succeeds, and bit 0 of its result is 1";
    abort_unknown_queue, ["1.5-c"], Always, Io, "Base 2.1, 5.1.1",
        "the abort of a command of no queue says that it was not aborted, or is refused";
    abort_limit, ["1.5-d"], Always, Admin, "Base 2.1, 5.1.1, 5.1.13.2.1",
        "as many aborts as ACL says are taken at one time; none beyond is lost";
    abort_leaves_others, [], Always, Admin, "Base 2.1, 5.1.1",
        "only the command that is named is aborted";
}

fn event_request(host: &mut Host) -> Check<u16> {
    host.submit(0, admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0))
}

fn abort(sqid: u16, cid: u16) -> test_host::Command {
    admin(AdminOpcode::ABORT, 0).dw(10, u32::from(cid) << 16 | u32::from(sqid))
}

fn abort_event_request(host: &mut Host) -> Check {
    let waiting = event_request(host)?;
    let command = host.submit(0, abort(0, waiting))?;
    let first = host.next(0)?;
    same!(first.cid(), waiting, "identifier of the first completion");
    first.expect(Status::ABORT_REQUESTED, "the command that was aborted")?;
    let second = host.next(0)?;
    same!(second.cid(), command, "identifier of the second completion");
    second.succeeds("Abort")?;
    same!(second.dw0() & 1, 0u32, "bit 0 of the result of Abort");
    Ok(())
}

fn abort_unknown_command(host: &mut Host) -> Check {
    for sqid in [0, 1] {
        let entry = host.admin(abort(sqid, 0x7abc))?;
        entry.succeeds(&format!("Abort of no command of queue {sqid}"))?;
        same!(entry.dw0() & 1, 1u32, "bit 0 of the result, queue {sqid}");
    }
    Ok(())
}

fn abort_unknown_queue(host: &mut Host) -> Check {
    let entry = host.admin(abort(0x1234, 1))?;
    entry.expect_one(
        &[
            Status::SUCCESS,
            Status::INVALID_FIELD,
            Status::INVALID_QUEUE_IDENTIFIER,
        ],
        "Abort of a command of queue 1234h",
    )?;
    if entry.status().is_success() {
        same!(entry.dw0() & 1, 1u32, "bit 0 of the result");
    }
    Ok(())
}

fn abort_limit(host: &mut Host) -> Check {
    let limit = host.controller()?.abort_limit();
    let limits = host.controller()?.event_limit();
    require!(limit >= 1 && limits >= 1, "ACL and AERL");
    let count = (limit + 8).min(60);
    let mut sent = Vec::new();
    for _ in 0..count {
        sent.push(host.put_command(0, abort(0, 0x7abc))?);
    }
    host.ring_tail(0)?;
    let mut taken = 0;
    for cid in sent {
        let entry = host.wait_for(0, cid)?;
        entry.expect_one(
            &[Status::SUCCESS, Status::ABORT_COMMAND_LIMIT_EXCEEDED],
            "one of many aborts",
        )?;
        taken += usize::from(entry.status().is_success());
    }
    require!(
        taken >= limit.min(count),
        "{taken} aborts of {limit} were taken"
    );
    Ok(())
}

fn abort_leaves_others(host: &mut Host) -> Check {
    let limit = host.controller()?.event_limit();
    if limit < 2 {
        return crate::verdict::not_applicable("AERL allows one event request only");
    }
    let (first, second) = (event_request(host)?, event_request(host)?);
    host.admin(abort(0, second))?.succeeds("Abort")?;
    let entry = host.wait_for(0, second)?;
    entry.expect(Status::ABORT_REQUESTED, "the command that was aborted")?;
    host.stays_quiet(0, "the other command")?;
    host.admin(abort(0, first))?.succeeds("Abort")?;
    host.wait_for(0, first)?
        .expect(Status::ABORT_REQUESTED, "the other command")
}
