//! The Admin queue pair. It runs one command at a time, while Asynchronous Event Requests stay
//! outstanding.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme::aen::AsyncEvent;
use nvme::regs::{self, Csts};
use nvme::{AdminOpcode, Command, Completion, Status};

use crate::buffer::{DmaBuffer, Heap};
use crate::error::Error;
use crate::options::Options;
use crate::queue::host_doorbell::HostDoorbell;
use crate::queue::ring::{CqRing, ShadowBuffers, SqRing};
use crate::transport::{Transport, TransportError};

/// Number of entries of the Admin queues, where few commands are ever outstanding.
const ENTRIES: u32 = 32;
/// Maximum data of one admin command in bytes: two pages, so that no PRP list is needed.
pub(crate) const MAX_DATA: usize = 8192;
/// Number of polls for a completion before the thread yields, and later sleeps between polls.
const SPIN: u32 = 2000;

/// Reads the Controller Status register. Fails when it reads as all ones, because the device is
/// lost.
pub(crate) fn csts(transport: &dyn Transport) -> Result<Csts, Error> {
    match transport.read32(regs::CSTS) {
        Ok(u32::MAX) | Err(TransportError::Gone(_)) => Err(Error::Gone),
        Ok(bits) => Ok(Csts::from_bits(bits)),
        Err(error) => Err(error.into()),
    }
}

/// Waits briefly for the controller in a polling loop. The pause grows with `round`.
pub(crate) fn relax(transport: &dyn Transport, round: u32) {
    transport.pause();
    if !transport.is_stepped() && round > SPIN {
        std::thread::sleep(Duration::from_micros(50));
    }
}

pub(crate) struct Admin {
    transport: Arc<dyn Transport>,
    sq: SqRing,
    cq: CqRing,
    sq_doorbell: HostDoorbell,
    cq_doorbell: HostDoorbell,
    tail: u32,
    head: u32,
    phase: bool,
    last_cid: u16,
    /// Command identifiers of the outstanding Asynchronous Event Requests.
    waiting: Vec<u16>,
    pub events: VecDeque<AsyncEvent>,
    scratch: DmaBuffer,
    /// An earlier command was never completed. The queue is unusable until the next reset, because
    /// the device may still access its buffer.
    stuck: bool,
    pub stale: u64,
}

impl Admin {
    pub fn new(
        transport: &Arc<dyn Transport>,
        heap: &Arc<Heap>,
        options: &Options,
        dstrd: u8,
    ) -> Result<Self, Error> {
        let area = Error::Unusable("queue memory");
        let sq = heap.allocate(ENTRIES as usize * size_of::<Command>())?;
        let cq = heap.allocate(ENTRIES as usize * size_of::<Completion>())?;
        let (Some(sq), Some(cq)) = (SqRing::new(sq, ENTRIES), CqRing::new(cq, ENTRIES)) else {
            return Err(area);
        };
        let doorbell = |is_cq| {
            let offset = regs::doorbell_offset(0, is_cq, dstrd);
            HostDoorbell::new(transport, offset, ENTRIES, options.doorbells.behaviour)
        };
        Ok(Self {
            transport: transport.clone(),
            sq,
            cq,
            sq_doorbell: doorbell(false),
            cq_doorbell: doorbell(true),
            tail: 0,
            head: 0,
            phase: true,
            last_cid: 0,
            waiting: Vec::new(),
            events: VecDeque::new(),
            scratch: heap.allocate(MAX_DATA)?,
            stuck: false,
            stale: 0,
        })
    }

    /// Returns the values of the registers AQA, ASQ and ACQ for the Admin queues.
    pub fn registers(&self) -> (u32, u64, u64) {
        let size = (ENTRIES - 1) as u16;
        let aqa = regs::Aqa::new().with_asqs_z(size).with_acqs_z(size);
        (aqa.into_bits(), self.sq.iova(), self.cq.iova())
    }

    /// Reinitializes the Admin queues after a reset, while the controller is disabled.
    pub fn reset(&mut self) {
        self.cq.clear();
        self.sq_doorbell.reset();
        self.cq_doorbell.reset();
        (self.tail, self.head, self.phase) = (0, 0, true);
        self.waiting.clear();
        self.stuck = false;
    }

    /// Starts to use shadow doorbells for the Admin queues after Doorbell Buffer Config. Only for
    /// tests of hosts that do so. Both shadow entries then hold the current indexes, set by the
    /// controller or by this call.
    pub fn attach(&mut self, buffers: &Arc<ShadowBuffers>, stride: usize) {
        for (doorbell, at, index) in [
            (&mut self.sq_doorbell, 0, self.tail),
            (&mut self.cq_doorbell, stride, self.head),
        ] {
            if let Some(cells) = buffers.cells(at) {
                doorbell::Cell::store(
                    cells.get().doorbell,
                    index,
                    doorbell::ProtocolAccess::Initialise,
                );
                doorbell.attach(Some(cells));
            }
        }
    }

    fn submit(&mut self, mut command: Command) -> u16 {
        loop {
            self.last_cid = self.last_cid.wrapping_add(1);
            // FFFFh is reserved as a command identifier (NVMe Base 2.1, 4.1.1).
            if self.last_cid != u16::MAX && !self.waiting.contains(&self.last_cid) {
                break;
            }
        }
        command.cid = self.last_cid.into();
        self.sq.put(self.tail, &command);
        self.tail = (self.tail + 1) % ENTRIES;
        self.sq_doorbell.publish(self.tail);
        self.last_cid
    }

    /// Submits an Asynchronous Event Request.
    pub fn request_event(&mut self) {
        let cid = self.submit(Command::new(AdminOpcode::ASYNC_EVENT_REQUEST.0, 0, 0));
        self.waiting.push(cid);
    }

    /// Returns the number of outstanding Asynchronous Event Requests.
    pub fn event_requests(&self) -> usize {
        self.waiting.len()
    }

    /// Consumes new completion entries. Returns the completion of command `wanted`, if it is among
    /// them; completed event requests are kept for later.
    pub fn look(&mut self, wanted: Option<u16>) -> Option<Completion> {
        let mut found = None;
        let mut moved = false;
        while let Some(entry) = self.cq.take(self.head, self.phase).map(Completion::from) {
            moved = true;
            self.head += 1;
            if self.head == ENTRIES {
                (self.head, self.phase) = (0, !self.phase);
            }
            let cid = entry.cid.get();
            if let Some(at) = self.waiting.iter().position(|&aer| aer == cid) {
                self.waiting.swap_remove(at);
                if entry.status().is_success() {
                    self.events
                        .push_back(AsyncEvent::from_bits(entry.dw0.get()));
                }
            } else if Some(cid) == wanted && found.is_none() {
                found = Some(entry);
            } else {
                self.stale += 1;
                tracing::debug!(cid, "completion of no admin command");
            }
        }
        if moved {
            self.cq_doorbell.publish(self.head);
        }
        found
    }

    /// Executes an admin command without data, and waits up to `limit` for its completion.
    pub fn execute(&mut self, command: Command, limit: Duration) -> Result<Completion, Error> {
        if self.stuck {
            return Err(Error::AdminTimeout {
                opcode: command.opcode,
            });
        }
        let cid = self.submit(command);
        let deadline = Instant::now() + limit;
        let mut round = 0;
        loop {
            if let Some(entry) = self.look(Some(cid)) {
                return match entry.status().into_result() {
                    Ok(()) => Ok(entry),
                    Err(status) => Err(Error::Admin {
                        opcode: command.opcode,
                        status,
                    }),
                };
            }
            relax(&*self.transport, round);
            round += 1;
            // Registers and clock are read only now and then: a register read may be a message.
            if round.is_multiple_of(256) {
                let csts = csts(&*self.transport).inspect_err(|_| self.stuck = true)?;
                if csts.cfs() || !csts.rdy() {
                    self.stuck = true;
                    return Err(Error::Fatal {
                        csts: csts.into_bits(),
                    });
                }
                if Instant::now() >= deadline {
                    self.stuck = true;
                    return Err(Error::AdminTimeout {
                        opcode: command.opcode,
                    });
                }
            }
        }
    }

    /// Executes an admin command that transfers up to [`MAX_DATA`] bytes to the host.
    pub fn read(
        &mut self,
        mut command: Command,
        data: &mut [u8],
        limit: Duration,
    ) -> Result<Completion, Error> {
        self.point(&mut command, data.len())?;
        let entry = self.execute(command, limit)?;
        let copied = self.scratch.read(0, data);
        copied.map_err(|_| Error::Unusable("admin buffer"))?;
        Ok(entry)
    }

    /// Executes an admin command that transfers up to [`MAX_DATA`] bytes from the host.
    pub fn write(
        &mut self,
        mut command: Command,
        data: &[u8],
        limit: Duration,
    ) -> Result<Completion, Error> {
        self.point(&mut command, data.len())?;
        let copied = self.scratch.write(0, data);
        copied.map_err(|_| Error::Unusable("admin buffer"))?;
        self.execute(command, limit)
    }

    fn point(&self, command: &mut Command, len: usize) -> Result<(), Error> {
        if len > MAX_DATA {
            return Err(Error::Admin {
                opcode: command.opcode,
                status: Status::INVALID_FIELD,
            });
        }
        if !self.stuck {
            let _ = self.scratch.fill(0);
        }
        let second = if len > 4096 {
            self.scratch.iova() + 4096
        } else {
            0
        };
        command.set_prps(self.scratch.iova(), second);
        Ok(())
    }
}
