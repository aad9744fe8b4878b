//! Effects of Zone Management Send on zones (Zoned Namespace Command Set 1.1).

use super::zoned::{
    CLOSED, EMPTY, EXPLICIT, FULL, IMPLICIT, Zoned, any, done, each, holds, is, send, send_command,
    write, zone,
};
use crate::case::{Need::*, cases};
use crate::host::Host;
use crate::verdict::{Check, Expect, same};
use nvme::Status;
use nvme::cmd::zone::Zsa;

cases! {
    zone_open_close, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "Open Zone opens empty and closed zones, Close Zone closes open ones, a write opens a \
         closed one, and the write pointer stays";
    zone_finish, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "Finish Zone makes empty, open and closed zones full";
    zone_reset, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "Reset Zone makes open, closed and full zones empty, to be written from their beginning";
    zone_transitions, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3.1",
        "what a state does not allow is Invalid Zone State Transition, and changes nothing";
    zone_select_all, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3",
        "with Select All an action is for the zones in its states, whatever the LBA is";
    zone_send_errors, [], If("ZNS"), Disabled, "ZNS 1.1, 3.4.3",
        "reserved actions, and an LBA that is no zone's first, are Invalid Field in Command; one \
         behind the namespace is LBA Out of Range";
    zone_open_limit, [], If("MOR"), Disabled, "ZNS 1.1, 2.1.1",
        "no more zones are opened than MOR says; one that a write has opened is closed for another";
    zone_active_limit, [], If("MAR"), Disabled, "ZNS 1.1, 2.1.1",
        "no more zones are active than MAR says; Finish and Reset Zone release an active resource";
}

fn zone_open_close(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        done(host, z, Zsa::OPEN, 1)?;
        is(host, z, 1, EXPLICIT, 0)?;
        write(host, z, z.start(1), 2, 1)?.succeeds("a write to an open zone")?;
        is(host, z, 1, EXPLICIT, 2)?;
        done(host, z, Zsa::CLOSE, 1)?;
        is(host, z, 1, CLOSED, 2)?;
        done(host, z, Zsa::CLOSE, 1)?;
        done(host, z, Zsa::OPEN, 1)?;
        is(host, z, 1, EXPLICIT, 2)?;
        done(host, z, Zsa::CLOSE, 1)?;
        write(host, z, z.start(1) + 2, 1, 2)?.succeeds("a write to a closed zone")?;
        is(host, z, 1, IMPLICIT, 3)?;
        done(host, z, Zsa::OPEN, 1)?;
        is(host, z, 1, EXPLICIT, 3)?;
        holds(host, z, z.start(1), 2, 1)
    })
}

fn zone_finish(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        write(host, z, z.start(2), 2, 1)?.succeeds("a write")?;
        done(host, z, Zsa::OPEN, 3)?;
        done(host, z, Zsa::OPEN, 4)?;
        done(host, z, Zsa::CLOSE, 4)?;
        for number in 1..5 {
            done(host, z, Zsa::FINISH, number)?;
            is(host, z, number, FULL, 0)?;
            let entry = write(host, z, z.start(number), 1, 9)?;
            entry.refused(Status::ZONE_IS_FULL, "a write to a zone that was finished")?;
        }
        holds(host, z, z.start(2), 2, 1)
    })
}

fn zone_reset(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        for number in [2, 4] {
            write(host, z, z.start(number), 2, 1)?.succeeds("a write")?;
        }
        done(host, z, Zsa::OPEN, 3)?;
        done(host, z, Zsa::CLOSE, 4)?;
        done(host, z, Zsa::FINISH, 5)?;
        for number in 1..6 {
            done(host, z, Zsa::RESET, number)?;
            is(host, z, number, EMPTY, 0)?;
            write(host, z, z.start(number), 1, 7)?.succeeds("a write to a zone that was reset")?;
            holds(host, z, z.start(number), 1, 7)?;
            done(host, z, Zsa::RESET, number)?;
        }
        Ok(())
    })
}

fn zone_transitions(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        write(host, z, z.start(2), 2, 1)?.succeeds("a write")?;
        done(host, z, Zsa::FINISH, 3)?;
        for (zsa, number, state, written) in [
            (Zsa::CLOSE, 1, EMPTY, 0),
            (Zsa::OFFLINE, 1, EMPTY, 0),
            (Zsa::OFFLINE, 2, IMPLICIT, 2),
            (Zsa::OPEN, 3, FULL, 0),
            (Zsa::CLOSE, 3, FULL, 0),
            (Zsa::OFFLINE, 3, FULL, 0),
        ] {
            let what = format!("{zsa} of a zone in state {state:x}h");
            let entry = send(host, z, zsa, number)?;
            entry.refused(Status::INVALID_ZONE_STATE_TRANSITION, &what)?;
            is(host, z, number, state, written)?;
        }
        Ok(())
    })
}

fn zone_select_all(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        let states = |host: &mut Host, wanted: [u8; 3], what: &str| {
            for (number, state) in (1..).zip(wanted) {
                let found = zone(host, z, number)?.state;
                same!(found, state, "zone {number} after {what}");
            }
            Ok(())
        };
        write(host, z, z.start(1), 2, 1)?.succeeds("a write")?;
        done(host, z, Zsa::OPEN, 2)?;
        // The LBA is no zone's first, and does not count.
        let all = |zsa: Zsa| send_command(z, zsa, z.start(1) + 1).dw(13, 0x100 | u32::from(zsa.0));
        host.io(all(Zsa::CLOSE))?.succeeds("Close Zone of all")?;
        states(host, [CLOSED, CLOSED, EMPTY], "Close Zone of all")?;
        host.io(all(Zsa::OPEN))?.succeeds("Open Zone of all")?;
        states(host, [EXPLICIT, EXPLICIT, EMPTY], "Open Zone of all")?;
        done(host, z, Zsa::CLOSE, 2)?;
        host.io(all(Zsa::FINISH))?.succeeds("Finish Zone of all")?;
        states(host, [FULL, FULL, EMPTY], "Finish Zone of all")?;
        host.io(all(Zsa::OFFLINE))?
            .succeeds("Offline Zone of all")?;
        states(host, [FULL, FULL, EMPTY], "Offline Zone of all")?;
        write(host, z, z.start(3), 1, 1)?.succeeds("a write")?;
        host.io(all(Zsa::RESET))?.succeeds("Reset Zone of all")?;
        states(host, [EMPTY; 3], "Reset Zone of all")?;
        for number in 1..4 {
            is(host, z, number, EMPTY, 0)?;
        }
        Ok(())
    })
}

fn zone_send_errors(host: &mut Host) -> Check {
    each(host, any, |host, z| {
        for zsa in [Zsa(0), Zsa(0x55), Zsa(0xff)] {
            let entry = send(host, z, zsa, 1)?;
            entry.refused(Status::INVALID_FIELD, "a reserved action")?;
        }
        for zsa in [Zsa::OPEN, Zsa::FINISH, Zsa::RESET] {
            let inside = send_command(z, zsa, z.start(1) + 1);
            host.io(inside)?
                .refused(Status::INVALID_FIELD, "an LBA that is no zone's first")?;
            let behind = send_command(z, zsa, z.ns.blocks);
            host.io(behind)?
                .refused(Status::LBA_OUT_OF_RANGE, "an LBA behind the last zone")?;
        }
        is(host, z, 1, EMPTY, 0)
    })
}

fn zone_open_limit(host: &mut Host) -> Check {
    let limited = |z: &Zoned| {
        z.open
            .is_some_and(|open| u64::from(open) + 2 <= z.count.min(64))
    };
    each(host, limited, |host, z| {
        let open = u64::from(z.open.unwrap_or(0));
        for number in 0..open {
            done(host, z, Zsa::OPEN, number)?;
        }
        let too_many = if z.active == z.open {
            &[Status::TOO_MANY_OPEN_ZONES, Status::TOO_MANY_ACTIVE_ZONES][..]
        } else {
            &[Status::TOO_MANY_OPEN_ZONES][..]
        };
        let entry = send(host, z, Zsa::OPEN, open)?;
        entry.expect_one(too_many, "Open Zone beyond MOR")?;
        let entry = write(host, z, z.start(open), 1, 1)?;
        entry.expect_one(too_many, "a write to an empty zone beyond MOR")?;
        is(host, z, open, EMPTY, 0)?;
        done(host, z, Zsa::FINISH, 0)?;
        // A zone that a write has opened is closed for another one.
        write(host, z, z.start(open), 1, 1)?.succeeds("a write that opens the last zone")?;
        if z.active.is_none_or(|active| u64::from(active) > open) {
            write(host, z, z.start(open + 1), 1, 1)?
                .succeeds("a write where a zone is implicitly open")?;
            is(host, z, open, CLOSED, 1)?;
        }
        Ok(())
    })
}

fn zone_active_limit(host: &mut Host) -> Check {
    let limited = |z: &Zoned| {
        let active = z.active.map(u64::from);
        active.is_some_and(|active| active + 2 <= z.count.min(64))
    };
    each(host, limited, |host, z| {
        let active = u64::from(z.active.unwrap_or(0));
        for number in 0..active {
            write(host, z, z.start(number), 1, 1)?.succeeds("a write to an empty zone")?;
            done(host, z, Zsa::CLOSE, number)?;
        }
        let entry = write(host, z, z.start(active), 1, 1)?;
        entry.expect(Status::TOO_MANY_ACTIVE_ZONES, "a write beyond MAR")?;
        let entry = send(host, z, Zsa::OPEN, active)?;
        entry.expect(Status::TOO_MANY_ACTIVE_ZONES, "Open Zone beyond MAR")?;
        is(host, z, active, EMPTY, 0)?;
        done(host, z, Zsa::FINISH, 0)?;
        write(host, z, z.start(active), 1, 1)?.succeeds("a write after Finish Zone")?;
        done(host, z, Zsa::RESET, 1)?;
        write(host, z, z.start(active + 1), 1, 1)?.succeeds("a write after Reset Zone")
    })
}
