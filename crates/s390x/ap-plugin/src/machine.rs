// SPDX-License-Identifier: GPL-2.0-or-later

//! Handlers of the AP-related instructions, based on the crate `ap`. No unsafe code.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use ap::card::{Cards, Latency, Layout};
use ap::instruction::{self, Cpu, PSW_PROBLEM};
use ap::interruption::{self, Psw};
use ap::outside::Clock;
use ap::{Facilities, Mediated, Outside, ProgramException, Subclass};
use ap_accel::Accelerator;

use crate::config::Config;
use crate::cpu::{ExecutingCpu, Storage, base};
use crate::ffi::{self, Register, Vcpu};
use crate::outside::{GuestPages, Outbox, Registry, WallClock};
use sync::Unpoisoned;

/// Kinds of instructions before which QEMU calls the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    /// The AP instructions NQAP, DQAP and PQAP.
    Ap,
    /// STFL and STFLE, which store the facility list.
    Facilities,
    /// LPSWE and LPSWEY, which load the program status word.
    LoadPsw,
}

const STFL: u16 = 0xb2b1;
const STFLE: u16 = 0xb2b0;
const LPSWE: u16 = 0xb2b2;
/// Operation code of LPSWEY, in the first and the last byte of the instruction.
const LPSWEY: (u8, u8) = (0xeb, 0x71);
/// Operation code of EX; EXRL is known by its first byte and the low half of its second.
const EX: u8 = 0x44;
const EXRL: (u8, u8) = (0xc6, 0x00);

/// Address at which STFL stores the facility list, relative to the prefix.
const STFL_LIST: u64 = 200;
/// Bit 14 of the PSW: the processor waits for an interruption.
const PSW_WAIT: u64 = 1 << 49;

/// Maximum length of a request. The driver sends at most 3,088 bytes; 12 KiB is the limit that
/// Linux assumes for such cards.
const LARGEST_REQUEST: usize = 12 * 1024;

/// Returns the kind of an instruction, given its bytes; `None` if the plugin does not watch it.
pub(crate) fn classify(code: &[u8]) -> Option<Site> {
    match *code {
        [high, low, _, _] => match u16::from_be_bytes([high, low]) {
            operation if instruction::is_ap(operation) => Some(Site::Ap),
            STFL | STFLE => Some(Site::Facilities),
            LPSWE => Some(Site::LoadPsw),
            _ => None,
        },
        [first, _, _, _, _, last] if (first, last) == LPSWEY => Some(Site::LoadPsw),
        _ => None,
    }
}

type Device = Mediated<GuestPages, Registry, WallClock, Cards<WallClock, Outbox, Accelerator>>;

/// A facility list that a processor is just storing.
#[derive(Clone, Copy, Debug)]
struct Storing {
    /// Address of the instruction after the one that stores the list.
    next: u64,
    /// Address at which the list is stored: virtual for STFLE, absolute for STFL.
    list: u64,
    /// Space for the list in doublewords; `None` for STFL, with its fixed list.
    room: Option<u64>,
}

#[derive(Debug)]
struct Machine {
    device: Device,
    clock: WallClock,
    outbox: Outbox,
    facilities: Facilities,
    log: bool,
    /// Interruption subclasses with a pending interruption; the leftmost bit is subclass 0.
    pending: u8,
    storing: BTreeMap<u32, Storing>,
    counts: BTreeMap<&'static str, u64>,
}

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Machine>> {
    MACHINE.lock().unpoisoned()
}

/// Creates the emulated cards from the plugin's arguments, and gives them to the guest.
pub(crate) fn start(arguments: &[String]) -> Result<(), String> {
    let config = Config::parse(arguments)?;
    let (clock, outbox) = (WallClock::new(), Outbox::default());
    let layout = Layout {
        domains: config.domains,
        depth: 8,
        largest_request: LARGEST_REQUEST,
        // Long enough for the driver to see both states, and to wait for an interruption.
        latency: Latency {
            reset: 1_000_000,
            interrupts: 100_000,
            request: 300_000,
        },
    };
    let mut cards = Cards::new(layout, clock, outbox.clone());
    for adapter in config.adapters.iter() {
        cards.plug(adapter, Accelerator);
    }
    let queues: Vec<_> = cards.queues().collect();
    let mut device = Mediated::new(Outside {
        pages: GuestPages::default(),
        subclasses: Registry::default(),
        clock,
        queues: cards,
    });
    for adapter in config.adapters.iter() {
        device.assign_adapter(adapter);
    }
    for domain in config.domains.iter() {
        device.assign_domain(domain);
    }
    for domain in config.control_domains.iter() {
        device.assign_control_domain(domain);
    }
    for apqn in queues {
        device.bind(apqn);
    }
    device.attach().map_err(|error| error.to_string())?;
    *lock() = Some(Machine {
        device,
        clock,
        outbox,
        facilities: config.facilities,
        log: config.log,
        pending: 0,
        storing: BTreeMap::new(),
        counts: BTreeMap::new(),
    });
    Ok(())
}

/// Destroys the guest's device when QEMU ends, and reports its counters and remaining resources.
pub(crate) fn at_exit() {
    let Some(mut machine) = lock().take() else {
        return;
    };
    let detached = machine.device.detach();
    let outside = machine.device.outside();
    let (pins, subclasses) = (outside.pages.held(), outside.subclasses.held());
    let counts: Vec<String> = machine
        .counts
        .iter()
        .map(|(k, v)| format!("{k}={v}"))
        .collect();
    eprintln!(
        "ap: end: {} pins={pins} subclasses={subclasses} detached={}",
        counts.join(" "),
        detached.is_ok()
    );
}

/// Executes NQAP, DQAP or PQAP before QEMU would, and continues behind it.
pub(crate) fn at_ap(vcpu: &mut Vcpu, at: u64) -> Option<u64> {
    let mut guard = lock();
    let machine = guard.as_mut()?;
    let mut code = [0; 4];
    if !vcpu.load(at, &mut code) || classify(&code) != Some(Site::Ap) {
        // The target of an EXECUTE, which nobody writes. QEMU answers with an operation exception.
        return None;
    }
    let old = Psw {
        mask: vcpu.read(Register::PswMask),
        address: at.wrapping_add(4),
    };
    let mut cpu = ExecutingCpu {
        vcpu,
        mask: old.mask,
    };
    let result = instruction::execute(&mut cpu, code, machine.facilities, &mut machine.device);
    machine.count(code, &cpu, &result);
    machine.advance();
    let new = match result {
        Ok(condition) => old.with_condition(condition),
        // QEMU does that one itself.
        Err(ProgramException::Operation) => return None,
        Err(exception) => {
            let prefix = vcpu.read(Register::Prefix);
            interruption::program(&mut Storage, prefix, old, exception)?
        }
    };
    vcpu.write(Register::PswMask, new.mask);
    Some(new.address)
}

/// Records where STFL or STFLE will store the facility list, before the instruction is executed.
pub(crate) fn at_facilities(vcpu: &mut Vcpu, at: u64) -> Option<u64> {
    let mut code = [0; 4];
    if !vcpu.load(at, &mut code) || classify(&code) != Some(Site::Facilities) {
        return None;
    }
    let [high, low, b, displacement] = code;
    let (list, room) = if u16::from_be_bytes([high, low]) == STFL {
        (vcpu.read(Register::Prefix).wrapping_add(STFL_LIST), None)
    } else {
        let displacement = u64::from(b & 15) << 8 | u64::from(displacement);
        let list = base(vcpu, b >> 4).wrapping_add(displacement);
        (list, Some((vcpu.read(Register::General(0)) & 0xff) + 1))
    };
    let next = at.wrapping_add(4);
    if let Some(machine) = lock().as_mut() {
        machine
            .storing
            .insert(vcpu.index(), Storing { next, list, room });
        ffi::call(vcpu.index(), true);
    }
    None
}

/// Adds the facility bits to the stored list, before the next instruction.
pub(crate) fn after_facilities(vcpu: &mut Vcpu, at: u64) -> Option<u64> {
    let mut guard = lock();
    let machine = guard.as_mut()?;
    let storing = machine.storing.remove(&vcpu.index())?;
    if storing.next != at {
        // The instruction did not complete, and will be executed again.
        return None;
    }
    *machine.counts.entry("facilities").or_default() += 1;
    match storing.room {
        Some(room) => {
            // Afterwards register 0 has the number of doublewords that there are, less one.
            let words = room.min((vcpu.read(Register::General(0)) & 0xff) + 1);
            let mut list = vec![0; usize::try_from(words * 8).unwrap_or(0)];
            if vcpu.load(storing.list, &mut list) {
                machine.facilities.add_to(&mut list);
                vcpu.store(storing.list, &list);
            }
        }
        None => {
            let mut list = [0; 4];
            if ffi::load_absolute(storing.list, &mut list) {
                machine.facilities.add_to(&mut list);
                ffi::store_absolute(storing.list, &list);
            }
        }
    }
    None
}

/// At the beginning of a block, while something is to be done: here the condition code is in its
/// place, and an interruption can be taken.
pub(crate) fn at_block(vcpu: &mut Vcpu, at: u64) -> Option<u64> {
    after_facilities(vcpu, at);
    let mut guard = lock();
    let machine = guard.as_mut()?;
    let mut code = [0; 2];
    let [first, second] = if vcpu.load(at, &mut code) {
        code
    } else {
        return None;
    };
    if first == EX || (first, second & 15) == EXRL {
        // An EXECUTE and its target are one: this may be in between. The next block is soon enough.
        return None;
    }
    let due = machine.advance();
    if machine.pending == 0 {
        ffi::call(vcpu.index(), due.is_some());
        return None;
    }
    let old = Psw {
        mask: vcpu.read(Register::PswMask),
        address: at,
    };
    machine.interrupt(vcpu, old)
}

/// Takes a pending interruption before a PSW is loaded, since a PSW that lets the processor wait
/// would delay it. The interruption appears to follow the load, so the loaded PSW is the old one.
pub(crate) fn at_load_psw(vcpu: &mut Vcpu, at: u64) -> Option<u64> {
    if vcpu.read(Register::PswMask) & PSW_PROBLEM != 0 {
        return None;
    }
    let mut code = [0; 6];
    if !vcpu.load(at, &mut code) {
        return None;
    }
    let [first, _, b, low, high, _] = code;
    let mut displacement = i64::from(b & 15) << 8 | i64::from(low);
    if first == LPSWEY.0 {
        displacement |= i64::from(high.cast_signed()) << 12;
    }
    let operand = base(vcpu, b >> 4).wrapping_add_signed(displacement);
    let mut psw = [0; 16];
    if !vcpu.load(operand, &mut psw) {
        return None;
    }
    let loaded = Psw::from_bytes(psw);
    if loaded.mask & PSW_WAIT == 0 || loaded.mask & Psw::IO == 0 {
        return None;
    }
    loop {
        let pause = {
            let mut guard = lock();
            let machine = guard.as_mut()?;
            let due = machine.advance();
            if let Some(next) = machine.interrupt(vcpu, loaded) {
                return Some(next);
            }
            due?.saturating_sub(machine.clock.now())
        };
        // A card is at work. A processor that waits runs nothing that could look at
        // the clock, so this looks.
        std::thread::sleep(Duration::from_nanos(pause));
    }
}

impl Machine {
    /// Takes the first pending interruption for which the processor is open; returns the address to
    /// continue at.
    fn interrupt(&mut self, vcpu: &mut Vcpu, old: Psw) -> Option<u64> {
        if self.pending == 0 {
            return None;
        }
        let (cr6, prefix) = (vcpu.read(Register::Control6), vcpu.read(Register::Prefix));
        let subclass = (0..8).map(Subclass::new).find(|subclass| {
            let is_pending = self.pending & place(*subclass) != 0;
            is_pending && interruption::is_open(old.mask, cr6, *subclass)
        })?;
        let new = interruption::adapter(&mut Storage, prefix, old, subclass)?;
        self.pending &= !place(subclass);
        *self.counts.entry("interruptions").or_default() += 1;
        vcpu.write(Register::PswMask, new.mask);
        Some(new.address)
    }

    /// Lets the cards do the work that is due, and makes the interruptions of their notifications
    /// pending. Returns the time of the next work.
    fn advance(&mut self) -> Option<u64> {
        let due = self.device.outside().queues.advance();
        for subclass in self.outbox.take() {
            self.pending |= place(subclass);
            *self.counts.entry("notifications").or_default() += 1;
        }
        if self.pending != 0 || due.is_some() {
            ffi::call_all(true);
        }
        due
    }

    fn count(
        &mut self,
        code: [u8; 4],
        cpu: &ExecutingCpu<'_>,
        result: &Result<u8, ProgramException>,
    ) {
        let function = cpu.gr(0) >> 24 & 0xff;
        let name = match (u16::from_be_bytes([code[0], code[1]]), function) {
            (instruction::NQAP, _) => "nqap",
            (instruction::DQAP, _) => "dqap",
            (_, 0) => "tapq",
            (_, 1) => "rapq",
            (_, 2) => "zapq",
            (_, 3) => "aqic",
            (_, 4) => "qci",
            _ => "other",
        };
        *self.counts.entry(name).or_default() += 1;
        if self.log && matches!(name, "rapq" | "zapq" | "aqic") {
            let (queue, status) = (cpu.gr(0) & 0xffff, cpu.gr(1));
            eprintln!("ap: {name} {queue:04x} {result:?} status {status:08x}");
        }
    }
}

/// The bit of a subclass in [`Machine::pending`].
fn place(subclass: Subclass) -> u8 {
    0x80 >> subclass.get()
}
