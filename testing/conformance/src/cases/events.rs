//! Asynchronous events (NVMe Base 2.1, 5.1.2).

use crate::bytes::{u16_at, u64_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, admin, nvm};
use crate::verdict::{Check, Expect, applies_if, require, same};
use nvme::{AdminOpcode, NvmOpcode, Status};
use test_host::Completion;

cases! {
    event_request_waits, ["1.7-c"], Always, Admin, "Base 2.1, 5.1.2",
        "an event request does not complete while there is no event";
    event_request_limit, ["1.7-2", "5.4-2"], Always, Admin, "Base 2.1, 5.1.2",
        "one request more than AERL says is Asynchronous Event Request Limit Exceeded";
    event_doorbell_value, ["1.7-d", "5.5-a"], Always, Io,
        "Base 2.1, 5.1.2.1; PCIe Transport 1.1, 3.1.2",
        "a doorbell value outside its queue is an error event, and leaves an entry in the error \
         log";
    event_doorbell_register, ["1.7-d", "5.5-b"], Always, Io,
        "Base 2.1, 5.1.2.1; PCIe Transport 1.1, 3.1.2",
        "the doorbell of a queue that is not there is an error event";
    event_doorbell_invalid_head, ["1.7-d"], Always, Admin, "Base 2.1, 5.1.2.1",
        "a completion queue head outside its queue is an error event when the controller comes to \
         use it, and the queue goes on";
    event_masked_until_read, ["1.7-e"], Always, Io, "Base 2.1, 5.1.2",
        "after an event, others of its type wait until its log page is read";
    event_retained, ["1.7-f"], Always, Io, "Base 2.1, 5.1.2, 5.1.12",
        "reading the log page with Retain Asynchronous Event keeps the type masked";
    event_before_request, ["1.7-g"], Always, Io, "Base 2.1, 5.1.2",
        "an event that comes before a request is told to the next request";
    event_temperature, ["1.7-h"], Always, Admin, "Base 2.1, 5.1.2.1, 5.1.25.1.3",
        "a temperature beyond its threshold is a health event if that is enabled";
    event_temperature_disabled, ["1.7-h"], Always, Admin, "Base 2.1, 5.1.25.1.5",
        "a temperature beyond its threshold is no event if that is disabled";
    event_requests_end_with_reset, ["1.7-i"], Always, Admin, "Base 2.1, 3.7.2",
        "a controller reset forgets event requests: there may be as many again";
}

fn request(host: &mut Host) -> Check<u16> {
    host.submit(0, admin(AdminOpcode::ASYNC_EVENT_REQUEST, 0))
}

/// Checks the type and information of an asynchronous event. Returns the identifier of its log
/// page.
fn event(entry: &Completion, kind: u32, information: Option<u32>, what: &str) -> Check<u8> {
    entry.succeeds(what)?;
    let dw0 = entry.dw0();
    same!(dw0 & 7, kind, "{what}: type of the event");
    if let Some(information) = information {
        same!(
            dw0 >> 8 & 0xff,
            information,
            "{what}: information of the event"
        );
    }
    same!(dw0 >> 24, 0u32, "{what}: reserved bits of the event");
    Ok((dw0 >> 16) as u8)
}

fn event_request_waits(host: &mut Host) -> Check {
    request(host)?;
    host.stays_quiet(0, "an event request")
}

fn event_request_limit(host: &mut Host) -> Check {
    let limit = host.controller()?.event_limit();
    applies_if(limit < 60, "AERL is above what the case has entries for")?;
    for _ in 0..limit {
        request(host)?;
    }
    host.stays_quiet(0, &format!("{limit} event requests"))?;
    let cid = request(host)?;
    host.wait_for(0, cid)?.expect(
        Status::AER_LIMIT_EXCEEDED,
        &format!("event request {}", limit + 1),
    )
}

fn event_doorbell_value(host: &mut Host) -> Check {
    let before = u64_at(&host.log(1, 64)?, 0);
    let cid = request(host)?;
    let entries = host.io_entries();
    host.ring(1, false, entries.into())?;
    let entry = host.wait_for(0, cid)?;
    let lid = event(&entry, 0, Some(1), "a tail behind the queue's end")?;
    same!(lid, 1u8, "log page of the event");
    let log = host.log(1, 64)?;
    require!(u64_at(&log, 0) > before, "the error log has no new entry");
    same!(
        u16_at(&log, 8),
        0xffffu16,
        "queue of an entry that is of no command"
    );
    Ok(())
}

fn event_doorbell_register(host: &mut Host) -> Check {
    let cid = request(host)?;
    host.ring(2, false, 1)?;
    let entry = host.wait_for(0, cid)?;
    let lid = event(&entry, 0, Some(0), "the doorbell of no queue")?;
    same!(lid, 1u8, "log page of the event");
    Ok(())
}

fn event_doorbell_invalid_head(host: &mut Host) -> Check {
    super::rings::uneven(host, 16, 4)?;
    let ns = host.namespace()?;
    let cid = request(host)?;
    host.ring(1, true, 9)?;
    // More than fit: the controller has to look at the head.
    for _ in 0..6 {
        host.put_command(1, nvm(NvmOpcode::FLUSH, ns.nsid))?;
    }
    host.ring_tail(1)?;
    let entry = host.wait_for(0, cid)?;
    event(&entry, 0, Some(1), "a head behind the queue's end")?;
    let mut taken = 0;
    while host.poll_quietly(1)?.is_some() {
        taken += 1;
    }
    require!(
        taken <= 3,
        "{taken} completions are in a queue of four entries"
    );
    host.ring_head(1)?;
    for _ in taken..6 {
        host.next(1)?
            .succeeds("a Flush after the head was right again")?;
    }
    Ok(())
}

fn event_masked_until_read(host: &mut Host) -> Check {
    let limit = host.controller()?.event_limit();
    applies_if(limit >= 2, "AERL allows one event request only")?;
    let (first, second) = (request(host)?, request(host)?);
    host.ring(2, false, 1)?;
    event(&host.wait_for(0, first)?, 0, Some(0), "the first event")?;
    let entries = host.io_entries();
    host.ring(1, false, entries.into())?;
    host.stays_quiet(0, "a second event of the type")?;
    host.log(1, 64)?;
    event(&host.wait_for(0, second)?, 0, None, "the second event").map(|_| ())
}

fn event_retained(host: &mut Host) -> Check {
    let limit = host.controller()?.event_limit();
    applies_if(limit >= 2, "AERL allows one event request only")?;
    let (first, second) = (request(host)?, request(host)?);
    host.ring(2, false, 1)?;
    event(&host.wait_for(0, first)?, 0, Some(0), "the first event")?;
    let (entry, _) = host.log_raw(1, crate::info::ALL, 64, 0, 0x8000)?;
    entry.succeeds("the error log with Retain Asynchronous Event")?;
    let entries = host.io_entries();
    host.ring(1, false, entries.into())?;
    host.stays_quiet(0, "a second event of a type that is retained")?;
    host.log(1, 64)?;
    event(&host.wait_for(0, second)?, 0, None, "the second event").map(|_| ())
}

fn event_before_request(host: &mut Host) -> Check {
    host.ring(2, false, 1)?;
    // The controller processes a doorbell in its own time.
    host.controller()?;
    let cid = request(host)?;
    event(
        &host.wait_for(0, cid)?,
        0,
        Some(0),
        "an event that was waiting",
    )
    .map(|_| ())
}

fn temperature(host: &mut Host) -> Check<u32> {
    Ok(u16_at(&host.log(2, 512)?, 1).into())
}

fn event_temperature(host: &mut Host) -> Check {
    let now = temperature(host)?;
    host.set_feature(0x0b, 0, 2)?
        .succeeds("temperature events enabled")?;
    let cid = request(host)?;
    host.stays_quiet(0, "a temperature within its thresholds")?;
    host.set_feature(0x04, 0, now - 1)?
        .succeeds("a threshold below the temperature")?;
    let lid = event(
        &host.wait_for(0, cid)?,
        1,
        Some(1),
        "a temperature beyond its threshold",
    )?;
    same!(lid, 2u8, "log page of the event");
    Ok(())
}

fn event_temperature_disabled(host: &mut Host) -> Check {
    let now = temperature(host)?;
    host.set_feature(0x0b, 0, 0)?.succeeds("events disabled")?;
    request(host)?;
    host.set_feature(0x04, 0, now - 1)?
        .succeeds("a threshold below the temperature")?;
    host.stays_quiet(0, "a temperature beyond its threshold, disabled")
}

fn event_requests_end_with_reset(host: &mut Host) -> Check {
    let limit = host.controller()?.event_limit();
    applies_if(limit < 60, "AERL is above what the case has entries for")?;
    for _ in 0..2 {
        for _ in 0..limit {
            request(host)?;
        }
        host.stays_quiet(0, "event requests after a reset")?;
        host.disable()?;
        host.enable()?;
    }
    Ok(())
}
