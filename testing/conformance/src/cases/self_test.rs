//! Device Self-test (NVMe Base 2.1, 5.1.5, 8.1.7).

use crate::bytes::{u8_at, u32_at};
use crate::case::{Need::*, cases};
use crate::host::{Host, admin};
use crate::info::ALL;
use crate::verdict::{Check, Expect, applies_if, failed, require, same};
use nvme::{AdminOpcode, Status};
use std::time::{Duration, Instant};
use test_host::Command;

cases! {
    self_test_absent, ["1.10-a"], If("OACS bit 4 is 0"), Admin, "Base 2.1, 5.1.5",
        "without Device Self-test the command is Invalid Command Opcode";
    self_test_short, ["1.10-b"], If("OACS bit 4"), Admin, "Base 2.1, 8.1.7",
        "a short self-test ends, and is the newest result of its log";
    self_test_abort, ["1.10-c"], If("OACS bit 4"), Admin, "Base 2.1, 8.1.7",
        "a self-test is aborted by the command, and the log says so";
    self_test_twice, ["1.10-d", "1.11-a"], If("OACS bit 4"), Admin, "Base 2.1, 5.1.5",
        "a second self-test while one runs is Device Self-test In Progress";
    self_test_extended, ["1.11-b"], If("OACS bit 4"), Admin, "Base 2.1, 8.1.7",
        "an extended self-test runs, and the log tells how far it is";
    self_test_reset, ["1.10-e", "1.11-c"], If("OACS bit 4"), Admin, "Base 2.1, 8.1.7",
        "a controller reset aborts a short self-test, and the log says so";
    self_test_reserved_code, ["1.10-f"], If("OACS bit 4"), Admin, "Base 2.1, 5.1.5",
        "reserved self-test codes are Invalid Field in Command";
    self_test_namespace, ["1.10-g", "1.11-d"], If("OACS bit 4"), Admin, "Base 2.1, 5.1.5",
        "an NSID above NN is Invalid Namespace or Format; NSID 0 tests the controller alone";
}

const SHORT: u32 = 1;
const EXTENDED: u32 = 2;
const ABORT: u32 = 0xf;

fn test(nsid: u32, code: u32) -> Command {
    admin(AdminOpcode::DEVICE_SELF_TEST, nsid).dw(10, code)
}

fn offered(host: &mut Host) -> Check {
    applies_if(
        host.controller()?.oacs(4),
        "OACS bit 4 is 0: there is no self-test",
    )?;
    // Aborts a test that another case or host has left.
    host.admin(test(ALL, ABORT))?
        .succeeds("Device Self-test, abort")
}

/// Returns the code of the self-test in progress, and byte 0 of the newest result.
fn state(host: &mut Host) -> Check<(u8, u8)> {
    let log = host.log(6, 564)?;
    let done = u8_at(&log, 1) & 0x7f;
    require!(done <= 100, "the self-test is {done}% complete");
    Ok((u8_at(&log, 0) & 0xf, u8_at(&log, 4)))
}

fn wait(host: &mut Host) -> Check<u8> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let (running, newest) = state(host)?;
        if running == 0 {
            return Ok(newest);
        }
        if Instant::now() > deadline {
            return failed("the self-test has not ended within a minute");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn self_test_absent(host: &mut Host) -> Check {
    applies_if(!host.controller()?.oacs(4), "there is a self-test")?;
    host.admin(test(ALL, SHORT))?
        .refused(Status::INVALID_OPCODE, "Device Self-test")
}

fn self_test_short(host: &mut Host) -> Check {
    offered(host)?;
    host.admin(test(ALL, SHORT))?
        .succeeds("a short self-test")?;
    let newest = wait(host)?;
    same!(newest >> 4, 1u8, "code of the newest result");
    same!(newest & 0xf, 0u8, "the newest result");
    let log = host.log(6, 564)?;
    let valid = u8_at(&log, 4 + 2);
    same!(
        valid & 0xf0,
        0u8,
        "reserved bits of the valid diagnostic information"
    );
    Ok(())
}

fn self_test_abort(host: &mut Host) -> Check {
    offered(host)?;
    host.admin(test(ALL, EXTENDED))?
        .succeeds("an extended self-test")?;
    host.admin(test(ALL, ABORT))?.succeeds("its abort")?;
    let (running, newest) = state(host)?;
    same!(running, 0u8, "self-test that runs after its abort");
    same!(newest >> 4, 2u8, "code of the newest result");
    same!(
        newest & 0xf,
        1u8,
        "the newest result, aborted by the command"
    );
    Ok(())
}

fn self_test_twice(host: &mut Host) -> Check {
    offered(host)?;
    for first in [EXTENDED, SHORT] {
        host.admin(test(ALL, first))?.succeeds("a self-test")?;
        let entry = host.admin(test(ALL, SHORT))?;
        // A test of an empty device may be over already.
        let (running, _) = state(host)?;
        if running != 0 {
            entry.expect(Status::SELF_TEST_IN_PROGRESS, "a second self-test")?;
        }
        host.admin(test(ALL, ABORT))?.succeeds("its abort")?;
    }
    Ok(())
}

fn self_test_extended(host: &mut Host) -> Check {
    offered(host)?;
    host.admin(test(ALL, EXTENDED))?
        .succeeds("an extended self-test")?;
    let (running, newest) = state(host)?;
    require!(
        running == 2 || running == 0 && newest >> 4 == 2,
        "the log says that test {running} runs"
    );
    host.admin(test(ALL, ABORT))?.succeeds("its abort")
}

fn self_test_reset(host: &mut Host) -> Check {
    offered(host)?;
    host.admin(test(ALL, SHORT))?
        .succeeds("a short self-test")?;
    host.disable()?;
    host.enable()?;
    let (running, newest) = state(host)?;
    same!(running, 0u8, "self-test that runs after a reset");
    same!(newest >> 4, 1u8, "code of the newest result");
    let result = newest & 0xf;
    require!(
        result == 2 || result == 0,
        "the newest result is {result}: neither aborted by a reset, nor ended before"
    );
    Ok(())
}

fn self_test_reserved_code(host: &mut Host) -> Check {
    offered(host)?;
    for code in [0, 4, 0xd] {
        host.admin(test(ALL, code))?
            .refused(Status::INVALID_FIELD, &format!("self-test code {code:#x}"))?;
    }
    Ok(())
}

fn self_test_namespace(host: &mut Host) -> Check {
    offered(host)?;
    let above = host.controller()?.nn().saturating_add(1);
    host.admin(test(above, SHORT))?.refused(
        Status::INVALID_NAMESPACE_OR_FORMAT,
        "a self-test of an NSID above NN",
    )?;
    host.admin(test(0, SHORT))?
        .succeeds("a self-test of the controller alone")?;
    wait(host)?;
    let log = host.log(6, 64)?;
    let (valid, nsid) = (u8_at(&log, 4 + 2), u32_at(&log, 4 + 12));
    require!(
        valid & 1 == 0 || nsid == 0 || nsid == ALL,
        "the result is of namespace {nsid:#x}"
    );
    Ok(())
}
