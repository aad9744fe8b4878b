//! Controllers of one subsystem that have a zoned namespace together: two hosts, or two paths of
//! one.

use crate::common::*;
use crate::zones::history::*;
use crate::zones::subsystem::{CONFLICT, World, config};
use crate::zones::world::*;
use controller::{
    AnaGroup, Attach, ConfigError, Controller, ControllerConfig, FabricsConfig, NamespaceConfig,
    Subsystem, ZonedState,
};
use dma::{Prot, SharedPages};
use nvme::cmd::reservation::{Racqa, Rtype};
use nvme::cmd::zone::{ReportHeader, ZoneDescriptor, Zsa};
use nvme::log::AnaState;
use nvme::{AdminOpcode, Command, Completion, NvmOpcode, Status};
use reservations::Reservations;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use volume::{Effect, Fault, Faults, Io, IoOptions, OpKind};
use zerocopy::FromBytes;
use zones::{Geometry, Zones};

/// Several hosts, each with a controller that has the namespace.
struct Shared {
    w: World,
    namespace: NamespaceConfig,
    data: Arc<Faults>,
    file: Arc<Faults>,
    pages: SharedPages,
    geometry: Geometry,
}

impl Shared {
    /// The controllers are numbered from 1 on; `hosts` are the numbers of their hosts.
    fn with(geometry: Geometry, zones: Zones, hosts: &[u8]) -> Self {
        let disk = Disk::new(geometry, zones);
        let subsystem = Subsystem::new();
        subsystem.add_namespace(1, Reservations::new(false), None);
        let w = World {
            subsystem,
            hosts: Vec::new(),
        };
        let mut shared = Shared {
            w,
            namespace: disk.namespace,
            data: disk.data,
            file: disk.file,
            pages: disk.pages,
            geometry,
        };
        for (cntlid, host) in (1..).zip(hosts) {
            shared.come(cntlid, *host);
        }
        shared
    }

    fn new(geometry: Geometry) -> Self {
        Self::with(geometry, Zones::new(geometry).unwrap(), &[1, 2])
    }

    /// Adds a controller.
    fn come(&mut self, cntlid: u16, host: u8) {
        let config = config(&self.w.subsystem, cntlid, host);
        let mut h = Host::with(config, vec![self.namespace.clone()]);
        enable(&mut h);
        self.w.hosts.push(h);
    }

    fn kept(&self) -> Zones {
        kept(&self.pages, self.geometry)
    }

    fn writing(&self, who: usize, opcode: NvmOpcode, slba: u64, blocks: u32, at: u64) -> Command {
        writing(&self.w.hosts[who], opcode, slba, blocks, at)
    }

    fn write(&mut self, who: usize, slba: u64, blocks: u32, seed: u64) -> Status {
        let bytes = pattern(seed, blocks as usize * 512);
        self.w.hosts[who].write(place(0), &bytes);
        let command = self.writing(who, NvmOpcode::WRITE, slba, blocks, 0);
        plain(self.w.command(who, command))
    }

    fn send(&mut self, who: usize, zsa: Zsa, slba: u64) -> Status {
        plain(self.w.command(who, send(zsa, slba, false)))
    }

    fn append(&mut self, who: usize, start: u64, blocks: u32) -> Result<u64, Status> {
        let command = self.writing(who, NvmOpcode::ZONE_APPEND, start, blocks, 0);
        self.w.begin(who, command);
        placed(&self.w.end(who))
    }

    /// Begins a command, and continues until the volume holds this many requests.
    fn hold(&mut self, who: usize, command: Command, held: usize) -> u16 {
        let cid = self.w.begin(who, command);
        self.w.rounds(20);
        assert_eq!(self.data.held(), held);
        cid
    }

    fn receive(&mut self, who: usize) -> Command {
        let h = &self.w.hosts[who];
        let mut command = h.rw(NvmOpcode::ZONE_MANAGEMENT_RECEIVE, 1, 0, 1, REPORT);
        command.cdw12 = (4096 / 4 - 1).into();
        command
    }

    /// States and write pointers, as this host is told. They are what the table has.
    fn states(&mut self, who: usize) -> Vec<(u8, u64)> {
        let command = self.receive(who);
        assert_eq!(self.w.command(who, command), Status::SUCCESS);
        let data = self.w.hosts[who].read(REPORT, 4096);
        let (header, rest) = ReportHeader::ref_from_prefix(&data).unwrap();
        let count = header.zones.get() as usize;
        let zones = rest.chunks_exact(64).take(count);
        let zones = zones.map(|zone| ZoneDescriptor::read_from_bytes(zone).unwrap());
        let kept = self.kept();
        let states = (0..).zip(zones).map(|(number, zone)| {
            let kept: zones::Zone = kept.get(number).unwrap();
            assert_eq!(kept.state.number(), zone.state());
            (zone.state(), zone.wp.get())
        });
        states.collect()
    }

    fn data(&mut self, who: usize, slba: u64, blocks: u32) -> Vec<u8> {
        let at = DATA + (1 << 20);
        let h = &self.w.hosts[who];
        let mut read = h.rw(NvmOpcode::READ, 1, slba, blocks, at);
        h.prps(&mut read, at, u64::from(blocks) * BLOCK, PAGE);
        assert_eq!(self.w.command(who, read), Status::SUCCESS);
        self.w.hosts[who].read(at, blocks as usize * 512)
    }

    fn reap(&mut self, who: usize) -> Completion {
        self.w.end(who)
    }

    fn is_waiting(&self, who: usize) -> bool {
        self.w.hosts[who].peek(1).is_none()
    }

    fn state(&self) -> &Arc<ZonedState> {
        self.namespace.zones.as_ref().unwrap()
    }
}

/// Appends of two hosts that are in flight together, each with a place and data of its own.
#[test]
fn concurrent_appends_of_hosts_get_distinct_places() {
    let mut s = Shared::new(GEOMETRY);
    s.data.add(Fault::always(OpKind::Write, Effect::Hold));
    let mut sent = Vec::new();
    for number in 0..8u64 {
        let (who, blocks) = (number as usize % 2, 1 + number as u32 % 4);
        let bytes = pattern(number, blocks as usize * 512);
        s.w.hosts[who].write(place(number), &bytes);
        let append = s.writing(who, NvmOpcode::ZONE_APPEND, 64, blocks, number);
        sent.push((
            who,
            s.hold(who, append, number as usize + 1),
            number,
            blocks,
        ));
    }
    assert_eq!(s.kept().get(1).unwrap().written, 20);
    s.data.clear();
    s.data.release();
    let mut taken = [false; 20];
    let mut done = [Vec::new(), Vec::new()];
    for _ in 0..4 {
        for (who, done) in (0..).zip(&mut done) {
            done.push(s.reap(who));
        }
    }
    for (who, cid, seed, blocks) in sent {
        let done = done[who].iter().find(|done| done.cid.get() == cid);
        let at = placed(done.unwrap()).unwrap();
        // The other one reads it.
        assert!(s.data(1 - who, at, blocks) == pattern(seed, blocks as usize * 512));
        for block in at..at + u64::from(blocks) {
            let taken = &mut taken[(block - 64) as usize];
            assert!(!std::mem::replace(taken, true), "{block} twice");
        }
    }
    assert_eq!(taken, [true; 20]);
    for who in 0..2 {
        assert_eq!(s.states(who)[1], (IMPLICIT, 64 + 20));
    }
    // Writes of both go on from there, and each finds the pointer where the other has left it.
    for turn in 0..10 {
        assert_eq!(s.write(turn % 2, 84 + turn as u64, 1, 7), Status::SUCCESS);
        let behind = s.write(1 - turn % 2, 84 + turn as u64, 1, 7);
        assert_eq!(behind, Status::ZONE_INVALID_WRITE);
    }
}

/// A write that another host's controller has in flight would overwrite data that is written after
/// the reset.
#[test]
fn zone_reset_waits_for_writes_of_other_hosts() {
    for all in [false, true] {
        for append in [false, true] {
            let mut s = Shared::new(GEOMETRY);
            s.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
            s.w.hosts[0].write(place(0), &pattern(1, 8 * 512));
            let opcode = if append {
                NvmOpcode::ZONE_APPEND
            } else {
                NvmOpcode::WRITE
            };
            let first = s.writing(0, opcode, 0, 8, 0);
            s.hold(0, first, 1);
            s.w.begin(1, send(Zsa::RESET, 0, all));
            s.w.rounds(50);
            assert!(s.is_waiting(1), "it has not waited");
            // Commands that arrive meanwhile are to be sent again, from whichever host.
            let interrupted = Status::COMMAND_INTERRUPTED;
            assert_eq!(s.write(0, 8, 1, 2), interrupted);
            s.data.release();
            assert_eq!(s.reap(0).status(), Status::SUCCESS);
            assert_eq!(s.reap(1).status(), Status::SUCCESS);
            for who in 0..2 {
                assert_eq!(s.states(who)[0], (EMPTY, 0));
                assert_eq!(s.data(who, 0, 9), vec![0; 9 * 512]);
            }
            assert_eq!(s.write(0, 0, 1, 3), Status::SUCCESS);
            assert_eq!(s.data(1, 0, 1), pattern(3, 512));
        }
    }
}

/// Zones that another host has opened count, and give their places.
#[test]
fn zone_limits_are_shared_by_hosts() {
    let mut s = Shared::with(GEOMETRY, Zones::new(GEOMETRY).unwrap(), &[1, 2, 3]);
    assert_eq!(s.send(0, Zsa::OPEN, 0), Status::SUCCESS);
    assert_eq!(s.send(1, Zsa::OPEN, 64), Status::SUCCESS);
    assert_eq!(s.write(2, 128, 1, 1), Status::TOO_MANY_OPEN_ZONES);
    assert_eq!(s.send(2, Zsa::OPEN, 128), Status::TOO_MANY_OPEN_ZONES);
    assert_eq!(s.send(2, Zsa::CLOSE, 0), Status::SUCCESS);
    assert_eq!(s.write(2, 128, 1, 1), Status::SUCCESS);
    assert_eq!(s.append(0, 192, 1), Err(Status::TOO_MANY_ACTIVE_ZONES));
    let finish = send(Zsa::FINISH, 0, true);
    assert_eq!(s.w.command(0, finish), Status::SUCCESS);
    for who in 1..3 {
        assert_eq!(s.write(who, 129, 1, 1), Status::ZONE_IS_FULL);
    }
    assert_eq!(s.append(1, 192, 1), Ok(192));
    // Reads are refused by all as soon as one has taken a zone offline.
    let mut worn = Zones::new(GEOMETRY).unwrap();
    worn.set_worn(5, false);
    let mut s = Shared::with(GEOMETRY, worn, &[1, 2]);
    let read = s.writing(0, NvmOpcode::READ, 5 * 64, 1, 0);
    assert_eq!(s.w.command(0, read), Status::SUCCESS);
    assert_eq!(s.send(1, Zsa::OFFLINE, 5 * 64), Status::SUCCESS);
    let refused = plain(s.w.command(0, read));
    assert_eq!(refused, Status::ZONE_IS_OFFLINE);
}

/// One host's area is all hosts'.
#[test]
fn zrwa_is_shared_by_hosts() {
    let mut s = Shared::new(RANDOM);
    assert_eq!(plain(s.w.command(0, open_with_zrwa(64))), Status::SUCCESS);
    assert_eq!(s.write(1, 68, 4, 1), Status::SUCCESS);
    assert_eq!(s.write(0, 64, 4, 2), Status::SUCCESS);
    assert_eq!(
        s.append(1, 64, 1),
        Err(Status::INVALID_ZONE_OPERATION_REQUEST)
    );
    assert_eq!(s.send(1, Zsa::FLUSH_ZRWA, 64 + 7), Status::SUCCESS);
    assert_eq!(s.write(0, 64, 4, 3), Status::ZONE_INVALID_WRITE);
    let refused = plain(s.w.command(1, open_with_zrwa(128)));
    assert_eq!(refused, Status::ZRWA_RESOURCES_UNAVAILABLE);
    assert_eq!(s.states(0)[1], (EXPLICIT, 64 + 8));
    assert_eq!(s.data(0, 64, 4), pattern(2, 4 * 512));
    assert_eq!(s.data(0, 68, 4), pattern(1, 4 * 512));
}

/// What one host makes durable is what all have written.
#[test]
fn flush_covers_writes_of_all_hosts() {
    let mut s = Shared::new(GEOMETRY);
    s.file.add(Fault::always(OpKind::Flush, Effect::Hold));
    assert_eq!(s.write(0, 0, 3, 1), Status::SUCCESS);
    s.w.begin(1, Command::new(NvmOpcode::FLUSH.0, 0, 1));
    s.w.rounds(20);
    assert!(s.file.held() == 1 && s.is_waiting(1));
    assert_eq!(s.kept().get(0).unwrap().written, 3);
    s.file.release();
    assert_eq!(s.reap(1).status(), Status::SUCCESS);
}

/// Adding, resetting or removing one host's controller does not affect the others: zones that they
/// have opened stay open, and commands that they have begun continue.
#[test]
fn zones_belong_to_namespace_not_controller() {
    let mut s = Shared::new(GEOMETRY);
    assert_eq!(s.send(0, Zsa::OPEN, 64), Status::SUCCESS);
    assert_eq!(s.write(0, 0, 8, 1), Status::SUCCESS);
    let before = s.states(0);
    assert_eq!(before[..2], [(IMPLICIT, 8), (EXPLICIT, 64)]);
    s.data.add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Hold));
    s.hold(0, send(Zsa::RESET, 0, false), 1);
    let unchanged = |s: &mut Shared, what: &str| {
        let who = s.w.hosts.len() - 1;
        assert_eq!(s.states(who), before, "{what}");
        // The zone is being reset, still.
        let interrupted = s.write(who, 8, 1, 2);
        assert_eq!(interrupted, Status::COMMAND_INTERRUPTED, "{what}");
        assert!(s.is_waiting(0) && s.data.held() == 1, "{what}");
    };
    unchanged(&mut s, "two are there");
    s.come(3, 3);
    unchanged(&mut s, "a third has come");
    enable_again(&mut s.w.hosts[1]);
    s.w.hosts.swap(1, 2);
    unchanged(&mut s, "the second was reset");
    let h = &mut s.w.hosts[2];
    h.c.disconnect();
    for (memory, at, len) in [(&h.low, LOW, LOW_SIZE), (&h.high, HIGH, HIGH_SIZE)] {
        let backing = Some((memory.clone(), 0));
        h.c.dma_map(at, len, backing, Prot::RW).unwrap();
    }
    enable(h);
    unchanged(&mut s, "its VMM has gone, and another one has come");
    let h = &mut s.w.hosts[1];
    detach(h);
    h.c.attach(s.namespace.clone(), &h.io).unwrap();
    assert_eq!(h.c.attaching(), Attach::Done);
    s.w.hosts.swap(1, 2);
    unchanged(&mut s, "the third was detached and attached");
    s.w.hosts.pop();
    unchanged(&mut s, "the third has gone");
    s.data.release();
    assert_eq!(s.reap(0).status(), Status::SUCCESS);
    assert_eq!(s.states(1)[..2], [(EMPTY, 0), (EXPLICIT, 64)]);
    // After all controllers are removed, the open zones are unknown.
    assert_eq!(s.write(1, 128, 1, 3), Status::SUCCESS);
    s.w.hosts.clear();
    s.come(1, 1);
    assert_eq!(s.states(0)[..3], [(EMPTY, 0), (EMPTY, 64), (CLOSED, 129)]);
}

/// Nothing is left of the namespace.
fn detach(h: &mut Host) {
    assert!(h.c.detach(1));
    h.until(|h| {
        h.c.tidy(&h.io);
        h.c.has_detached()
    });
}

/// Resets the controller, with whatever is in flight.
fn enable_again(h: &mut Host) {
    h.disable();
    h.until(|h| !h.csts().rdy());
    enable(h);
}

/// A controller that is reset takes what it has in flight with it: its own zone reset has no
/// effect, and the other's continues.
#[test]
fn controller_reset_drops_own_commands_in_flight() {
    let mut s = Shared::new(GEOMETRY);
    assert_eq!(s.write(0, 0, 8, 1), Status::SUCCESS);
    s.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let held = s.writing(0, NvmOpcode::WRITE, 8, 8, 0);
    s.hold(0, held, 1);
    s.w.begin(0, send(Zsa::RESET, 0, false));
    s.w.rounds(20);
    assert!(s.is_waiting(0));
    assert_eq!(s.write(1, 16, 1, 2), Status::COMMAND_INTERRUPTED);
    enable_again(&mut s.w.hosts[0]);
    assert_eq!(s.data.held(), 0);
    // It has not taken place, and the zone is written on.
    assert_eq!(s.states(1)[0], (IMPLICIT, 16));
    assert_eq!(s.write(1, 16, 1, 2), Status::SUCCESS);
    assert_eq!(s.data(1, 0, 8), pattern(1, 8 * 512));
    s.data.clear();
    s.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let held = s.writing(0, NvmOpcode::ZONE_APPEND, 0, 1, 0);
    s.hold(0, held, 1);
    s.w.begin(1, send(Zsa::RESET, 0, false));
    s.w.rounds(20);
    assert!(s.is_waiting(1));
    enable_again(&mut s.w.hosts[0]);
    assert_eq!(s.reap(1).status(), Status::SUCCESS);
    assert_eq!(s.states(0)[0], (EMPTY, 0));
    assert_eq!(s.data(0, 0, 17), vec![0; 17 * 512]);
}

/// The same of one that is dropped: nobody waits for what it had in flight.
#[test]
fn removed_controller_blocks_no_zone_reset() {
    let mut s = Shared::with(GEOMETRY, Zones::new(GEOMETRY).unwrap(), &[1, 2, 3]);
    s.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let held = s.writing(2, NvmOpcode::WRITE, 0, 8, 0);
    s.hold(2, held, 1);
    s.w.begin(1, send(Zsa::RESET, 0, false));
    s.w.rounds(20);
    assert!(s.is_waiting(1));
    s.w.hosts.pop();
    assert_eq!(s.reap(1).status(), Status::SUCCESS);
    assert_eq!(s.states(0)[0], (EMPTY, 0));
    assert_eq!(s.write(0, 0, 8, 1), Status::SUCCESS);
    s.data.add(Fault::nth(OpKind::WriteZeroes, 1, Effect::Hold));
    s.hold(1, send(Zsa::RESET, 0, false), 1);
    assert_eq!(s.write(0, 8, 1, 2), Status::COMMAND_INTERRUPTED);
    s.w.hosts.pop();
    assert_eq!(s.states(0)[0], (IMPLICIT, 8));
    assert_eq!(s.write(0, 8, 1, 2), Status::SUCCESS);
    assert_eq!(s.send(0, Zsa::RESET, 0), Status::SUCCESS);
    assert_eq!(s.states(0)[0], (EMPTY, 0));
}

/// What a reservation keeps others from ("NVMe Zoned Namespace Command Set 1.1", 5.1): Zone Append
/// and Zone Management Send are writes, Zone Management Receive is a read.
#[test]
fn zone_commands_respect_reservation() {
    let rtypes = [
        (Rtype::WRITE_EXCLUSIVE, Status::SUCCESS),
        (Rtype::EXCLUSIVE_ACCESS, CONFLICT),
    ];
    for (rtype, reads) in rtypes {
        let mut s = Shared::new(GEOMETRY);
        assert_eq!(s.append(1, 0, 4), Ok(0));
        assert_eq!(s.w.register(0, 1), Status::SUCCESS);
        assert_eq!(s.w.acquire(0, rtype, 1), Status::SUCCESS);
        let before = s.states(0);
        assert_eq!(s.write(1, 4, 1, 1), CONFLICT);
        assert_eq!(s.append(1, 0, 1), Err(CONFLICT));
        let zeroes = s.writing(1, NvmOpcode::WRITE_ZEROES, 4, 1, 0);
        assert_eq!(plain(s.w.command(1, zeroes)), CONFLICT);
        for zsa in [Zsa::OPEN, Zsa::CLOSE, Zsa::FINISH, Zsa::RESET, Zsa::OFFLINE] {
            for all in [false, true] {
                let refused = plain(s.w.command(1, send(zsa, 0, all)));
                assert_eq!(refused, CONFLICT, "{zsa}");
            }
        }
        let receive = s.receive(1);
        assert_eq!(plain(s.w.command(1, receive)), reads);
        let read = s.writing(1, NvmOpcode::READ, 0, 1, 0);
        assert_eq!(plain(s.w.command(1, read)), reads);
        assert_eq!(s.states(0), before);
        // The holder continues.
        assert_eq!(s.append(0, 0, 1), Ok(4));
        assert_eq!(s.send(0, Zsa::RESET, 0), Status::SUCCESS);
    }
}

/// A host that is fenced with abort: what it had in flight is over when the fence completes, a
/// reset that waits for others' writes, too.
#[test]
fn preempt_and_abort_waits_for_appends_and_zone_resets() {
    let mut s = Shared::new(GEOMETRY);
    assert_eq!(s.w.register(0, 1), Status::SUCCESS);
    assert_eq!(s.w.register(1, 2), Status::SUCCESS);
    s.data.add(Fault::always(OpKind::Write, Effect::Hold));
    let mine = s.writing(0, NvmOpcode::ZONE_APPEND, 64, 8, 0);
    s.hold(0, mine, 1);
    let append = s.writing(1, NvmOpcode::ZONE_APPEND, 0, 8, 0);
    s.hold(1, append, 2);
    // It waits for the other host's write.
    s.w.begin(1, send(Zsa::RESET, 64, false));
    s.w.rounds(10);
    let rtype = Rtype::WRITE_EXCLUSIVE;
    assert_eq!(s.w.acquire(0, rtype, 1), Status::SUCCESS);
    let fence = s.w.acquiring(0, Racqa::PREEMPT_AND_ABORT, rtype, [1, 2]);
    s.w.begin(0, fence);
    s.w.rounds(50);
    assert!(s.is_waiting(0), "the append may still happen");
    assert_eq!(s.append(1, 0, 1), Err(CONFLICT));
    s.data.clear();
    s.data.release();
    let mut done = [s.reap(0), s.reap(0)].map(|done| done.status());
    done.sort_by_key(|status| status.into_bits());
    assert_eq!(done, [Status::SUCCESS; 2]);
    for _ in 0..2 {
        assert_eq!(s.reap(1).status(), Status::SUCCESS);
    }
    assert_eq!(s.states(0)[..2], [(IMPLICIT, 8), (EMPTY, 64)]);
    assert_eq!(s.append(1, 0, 1), Err(CONFLICT));
}

/// Two paths of one host: by the one that is not reached nothing is done, and nothing of it is in
/// flight when that is known.
#[test]
fn inaccessible_path_changes_no_zone() {
    // What the reset waits for is of the same path, or of the other one.
    for (state, refusal, writer) in [
        (AnaState::INACCESSIBLE, Status::ANA_INACCESSIBLE, 0),
        (AnaState::PERSISTENT_LOSS, Status::ANA_PERSISTENT_LOSS, 1),
        (AnaState::CHANGE, Status::ANA_TRANSITION, 1),
    ] {
        let mut s = Shared::with(GEOMETRY, Zones::new(GEOMETRY).unwrap(), &[9, 9]);
        s.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
        let held = s.writing(writer, NvmOpcode::ZONE_APPEND, 0, 4, 0);
        s.hold(writer, held, 1);
        s.w.begin(0, send(Zsa::RESET, 0, false));
        s.w.rounds(10);
        let change = s.w.subsystem.set_ana_state(1, 1, state);
        s.w.rounds(20);
        assert!(!change.wait(Duration::ZERO), "they are in flight");
        for command in [
            s.writing(0, NvmOpcode::WRITE, 64, 1, 0),
            s.writing(0, NvmOpcode::WRITE_ZEROES, 64, 1, 0),
            s.writing(0, NvmOpcode::ZONE_APPEND, 64, 1, 0),
            s.writing(0, NvmOpcode::READ, 64, 1, 0),
            send(Zsa::FINISH, 64, false),
            send(Zsa::RESET, 0, true),
            s.receive(0),
        ] {
            assert_eq!(s.w.command(0, command), refusal);
        }
        // What has begun ends as it would have.
        s.data.release();
        for who in [0, writer] {
            assert_eq!(s.reap(who).status(), Status::SUCCESS);
        }
        s.w.rounds(3);
        assert!(change.wait(Duration::ZERO));
        assert_eq!(s.states(1)[..2], [(EMPTY, 0), (EMPTY, 64)]);
        // The other path does it, and this one again when it is reached.
        assert_eq!(s.append(1, 64, 4), Ok(64));
        let _ = s.w.subsystem.set_ana_state(1, 1, AnaState::NON_OPTIMIZED);
        s.w.rounds(3);
        assert_eq!(s.append(0, 64, 4), Ok(68));
        assert_eq!(s.states(0), s.states(1));
    }
}

/// One host formats the namespace: what the others have in flight is waited for, and all zones are
/// empty to all.
#[test]
fn format_empties_zones_of_all_hosts() {
    for with_reset in [false, true] {
        format_under_an_append(with_reset);
    }
}

fn format_under_an_append(with_reset: bool) {
    let mut s = Shared::new(GEOMETRY);
    assert_eq!(s.write(0, 0, 8, 1), Status::SUCCESS);
    assert_eq!(s.send(1, Zsa::OPEN, 64), Status::SUCCESS);
    s.data.add(Fault::nth(OpKind::Write, 1, Effect::Hold));
    let held = s.writing(1, NvmOpcode::ZONE_APPEND, 128, 8, 0);
    s.hold(1, held, 1);
    // It waits for that append, and the format for both.
    if with_reset {
        s.w.begin(0, send(Zsa::RESET, 128, false));
    }
    s.w.rounds(5);
    let format = Command::new(AdminOpcode::FORMAT_NVM.0, 0, 1);
    s.w.hosts[0].submit(0, format);
    s.w.rounds(50);
    assert!(s.w.hosts[0].peek(0).is_none(), "it has not waited");
    // Its own controller fetches nothing until its own commands have ended.
    assert_eq!(s.append(1, 0, 1), Err(Status::FORMAT_IN_PROGRESS));
    s.data.release();
    let mut done = None;
    for _ in 0..10_000 {
        s.w.round();
        done = s.w.hosts[0].reap(0);
        if done.is_some() {
            break;
        }
    }
    assert_eq!(done.unwrap().status(), Status::SUCCESS);
    for who in usize::from(!with_reset)..2 {
        assert_eq!(s.reap(who).status(), Status::SUCCESS);
    }
    for who in 0..2 {
        let states = s.states(who);
        assert_eq!(states[..3], [(EMPTY, 0), (EMPTY, 64), (EMPTY, 128)]);
        assert_eq!(s.data(who, 0, 8), vec![0; 8 * 512]);
    }
    assert_eq!(s.append(1, 128, 1), Ok(128));
}

/// Controllers that had zones of their own of a namespace would each write where the other has.
#[test]
fn controller_with_other_zones_is_refused() {
    let mut s = Shared::new(GEOMETRY);
    let plain = NamespaceConfig {
        zones: None,
        ..s.namespace.clone()
    };
    let own = with_zones(plain.clone(), Zones::new(GEOMETRY).unwrap(), None);
    let io = Io::new(IoOptions::default());
    let make = |s: &Shared, ns: &NamespaceConfig, cntlid| {
        let config = config(&s.w.subsystem, cntlid, 3);
        Controller::new(7, config, vec![ns.clone()], &io).err()
    };
    for ns in [&plain, &own] {
        let error = make(&s, ns, 3);
        assert!(matches!(error, Some(ConfigError::OtherZones(1))));
        let h = &mut s.w.hosts[1];
        if h.c.namespaces().count() > 0 {
            detach(h);
        }
        let error = h.c.attach(ns.clone(), &h.io).err();
        assert!(matches!(error, Some(ConfigError::OtherZones(1))));
    }
    assert!(make(&s, &s.namespace, 3).is_none());
    // Hosts that come over a network have no zones at all.
    let fabrics = FabricsConfig {
        in_capsule: 4096,
        queue_entries: 128,
        ana: Arc::new(AnaGroup::new(AnaState::OPTIMIZED)),
    };
    let config = ControllerConfig {
        fabrics: Some(fabrics),
        ..ControllerConfig::default()
    };
    let error = Controller::new(7, config, vec![own], &io).err();
    assert!(matches!(error, Some(ConfigError::SharedZones(1))));
    // After all controllers are removed, it may be another one.
    s.w.hosts.clear();
    assert!(make(&s, &plain, 3).is_none());
}

/// Hosts on threads of their own that append to the same zones at the same time, and reset another
/// one under the others' appends.
#[test]
fn host_threads_append_and_reset_concurrently() {
    const HOSTS: u16 = 2;
    const COUNT: u64 = 3000;
    let geometry = Geometry {
        zones: 4,
        size: 1 << 14,
        capacity: 1 << 14,
        max_open: None,
        max_active: None,
        zrwa: None,
    };
    let zones = Zones::new(geometry).unwrap();
    let namespace = with_zones(ns(1, mem(4 << 23), 512), zones, None);
    let subsystem = Subsystem::new();
    subsystem.add_namespace(1, Reservations::new(false), None);
    let begins = Arc::new(Barrier::new(HOSTS.into()));
    let resets = Arc::new(AtomicU64::new(0));
    let threads = (1..=HOSTS).map(|cntlid| {
        let (namespace, subsystem) = (namespace.clone(), subsystem.clone());
        let (begins, resets) = (begins.clone(), resets.clone());
        std::thread::spawn(move || {
            let mut h = Host::with(config(&subsystem, cntlid, cntlid as u8), vec![namespace]);
            enable(&mut h);
            begins.wait();
            let (mut sent, mut done, mut places) = (0u64, 0u64, Vec::new());
            let mut kinds = std::collections::BTreeMap::new();
            h.until(|h| {
                while sent - done < 24 && sent < COUNT {
                    // Of each eight, one is for the last zone, which is reset now and then.
                    let (zone, reset) = match sent % 64 {
                        63 => (3, true),
                        turn if turn % 8 == 7 => (3, false),
                        turn => (turn % 3, false),
                    };
                    let start = zone * geometry.size;
                    let slot = sent % 32;
                    h.write(place(slot), &[cntlid as u8 + 1; 512]);
                    let command = if reset {
                        send(Zsa::RESET, start, false)
                    } else {
                        writing(h, NvmOpcode::ZONE_APPEND, start, 1, slot)
                    };
                    kinds.insert(h.push(1, command), (zone, reset));
                    sent += 1;
                }
                h.ring_sq(1);
                for completion in h.reap_all(1) {
                    let (zone, reset) = kinds.remove(&completion.cid.get()).unwrap();
                    done += 1;
                    let status = plain(completion.status());
                    if zone == 3 && status == Status::COMMAND_INTERRUPTED {
                        continue;
                    }
                    assert_eq!(status, Status::SUCCESS);
                    if reset {
                        resets.fetch_add(1, Ordering::Relaxed);
                    } else {
                        places.push(placed(&completion).unwrap());
                    }
                }
                done == COUNT
            });
            begins.wait();
            (cntlid, places)
        })
    });
    let threads: Vec<_> = threads.collect();
    let mut all = Vec::new();
    let mut whose = std::collections::BTreeMap::new();
    for thread in threads {
        let (cntlid, places) = thread.join().unwrap();
        let lasting = places.into_iter().filter(|at| *at < 3 * geometry.size);
        for at in lasting {
            all.push(at);
            whose.insert(at, cntlid as u8 + 1);
        }
    }
    all.sort_unstable();
    let mut wanted = Vec::new();
    for zone in 0..3 {
        let of = |at: &&u64| **at / geometry.size == zone;
        let start = zone * geometry.size;
        wanted.extend((start..).take(all.iter().filter(of).count()));
    }
    assert!(all == wanted, "a place twice, or none");
    assert!(resets.load(Ordering::Relaxed) > 10);
    // Each block has the bytes of the append that was told its place.
    let mut h = Host::with(config(&subsystem, 9, 9), vec![namespace]);
    enable(&mut h);
    for (at, byte) in whose {
        let read = writing(&h, NvmOpcode::READ, at, 1, 0);
        assert_eq!(h.io(read), Status::SUCCESS);
        assert_eq!(h.read(place(0), 512), [byte; 512], "{at}");
    }
    // The last zone has nothing of the data from before its reset.
    let start = 3 * geometry.size;
    let written = (start..start + 2 * COUNT).map(|at| {
        let read = writing(&h, NvmOpcode::READ, at, 1, 0);
        assert_eq!(h.io(read), Status::SUCCESS);
        h.read(place(0), 1)[0] != 0
    });
    let written: Vec<bool> = written.collect();
    assert!(written.is_sorted_by(|before, after| before >= after));
}

// ---- histories

const HOSTS: u16 = 3;

impl Served for Shared {
    const QUEUES: u16 = HOSTS;

    fn host(&mut self, queue: u16) -> &mut Host {
        &mut self.w.hosts[usize::from(queue) - 1]
    }

    fn qid(_: u16) -> u16 {
        1
    }

    fn round(&mut self) {
        self.w.round();
    }

    fn kept(&self) -> Zones {
        Shared::kept(self)
    }

    fn check_states(&mut self) {
        let first = self.states(0);
        for who in 1..self.w.hosts.len() {
            assert_eq!(self.states(who), first);
        }
    }

    fn blocks(&mut self, slba: u64, blocks: u32) -> Vec<u8> {
        self.data(0, slba, blocks)
    }

    fn faults(&self) -> [Arc<Faults>; 2] {
        [self.data.clone(), self.file.clone()]
    }
}

/// Commands of three hosts, many in flight, of controllers that are reset, go and come.
#[test]
fn random_histories_of_several_hosts_match_model() {
    let geometry = Geometry {
        max_open: Some(3),
        max_active: Some(3),
        ..GEOMETRY
    };
    let (mut successes, mut lost, mut goes) = ([0; 2], 0, 0);
    for seed in 0..60u64 {
        let zones = Zones::new(geometry).unwrap();
        let shared = Shared::with(geometry, zones, &[1, 2, 3]);
        let mut w = History::new(shared, geometry, seed);
        w.successes = successes;
        for _ in 0..6 {
            for _ in 0..80 {
                match w.random(100) {
                    0..40 => w.submit(),
                    40..80 => {
                        let who = w.random(HOSTS.into()) as usize;
                        w.t.w.hosts[who].round();
                    }
                    80..90 => w.reap(),
                    90..93 => {
                        let kinds = [OpKind::Write, OpKind::WriteZeroes];
                        let kind = kinds[w.random(2) as usize];
                        let nth = 1 + w.random(4);
                        w.t.data.add(Fault::nth(kind, nth, Effect::Hold));
                    }
                    93 => {
                        let nth = 1 + w.random(2);
                        w.t.file.add(Fault::nth(OpKind::Flush, nth, Effect::Hold));
                    }
                    94..98 => {
                        w.t.data.release();
                        w.t.file.release();
                    }
                    98 => {
                        let queue = w.random(HOSTS.into()) as u16 + 1;
                        // Of the file's flushes none can be ended early.
                        w.t.file.release();
                        w.reap();
                        enable_again(w.t.host(queue));
                        lost += w.lose(queue);
                    }
                    _ => {
                        let queue = w.random(HOSTS.into()) as u16 + 1;
                        w.reap();
                        w.t.w.hosts.remove(usize::from(queue) - 1);
                        lost += w.lose(queue);
                        w.t.come(queue, queue as u8);
                        let hosts = &mut w.t.w.hosts;
                        let new = hosts.pop().unwrap();
                        hosts.insert(usize::from(queue) - 1, new);
                        goes += 1;
                    }
                }
            }
            w.verify();
            if w.random(2) == 0 {
                w.reset_all();
                w.verify();
            }
        }
        successes = w.successes;
        assert!(Arc::strong_count(w.t.state()) > 1);
    }
    println!("{successes:?} writes and resets, {lost} lost, {goes} controllers have gone");
    assert!(successes[0] > 2000 && successes[1] > 300 && lost > 300 && goes > 100);
}
