//! Handlers of the front-end's requests ("Vhost-user Protocol", Front-end message types).

use crate::backend::kick_token;
use crate::disk::{Disk, MAX_QUEUE_SIZE};
use crate::error::{ClientError, RequestRefusal};
use crate::eventfd::{Kick, Signal};
use crate::import::{FileImport, MemoryRequest};
use crate::inflight::Inflight;
use crate::log::DirtyLog;
use crate::queue::Queue;
use crate::ring::RingAddress;
use crate::session::{Pending, Session};
use crate::stream::Message;
use crate::virtio::{WRITEBACK_OFFSET, feature};
use crate::wire::*;
use dma::{MapError, Memory};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use zerocopy::IntoBytes;

/// Answer to a request of the front-end.
enum Answer {
    /// Success without a payload; acknowledged if the front-end wants that.
    Done,
    /// Success with this payload, and perhaps a descriptor.
    Payload(Vec<u8>, Option<OwnedFd>),
    /// The answer follows when the operation has ended.
    Later(Pending),
}

/// Maximum end offset of a read of configuration space (VHOST_USER_MAX_CONFIG_SIZE).
const MAX_CONFIG: u32 = 256;

type MessageResult = Result<Answer, RequestRefusal>;

/// Returns whether the request answers with a payload; a failure can then not be reported by
/// anything else.
fn answers(request: u32) -> bool {
    matches!(
        request,
        request::GET_FEATURES
            | request::GET_PROTOCOL_FEATURES
            | request::GET_QUEUE_NUM
            | request::GET_VRING_BASE
            | request::GET_CONFIG
            | request::GET_INFLIGHT_FD
            | request::GET_MAX_MEM_SLOTS
            | request::SET_LOG_BASE
    )
}

impl Session {
    /// Handles a request of the front-end: answers it, or records that the answer is pending.
    pub(crate) fn handle(&mut self, message: Message, disk: &mut Disk) -> Result<(), ClientError> {
        let header = message.header;
        tracing::trace!(
            request = header.request,
            size = header.size,
            fds = message.fds.len()
        );
        crash::point!("vhost-blk.message.taken");
        let handled = self.request(message, disk);
        crash::point!("vhost-blk.message.handled");
        if let Err(RequestRefusal::NotShared) = handled {
            self.say_not_shared();
        }
        self.answer(&header, handled, disk)
    }

    fn answer(
        &mut self,
        header: &Header,
        handled: MessageResult,
        disk: &mut Disk,
    ) -> Result<(), ClientError> {
        match handled {
            Ok(Answer::Done) => self.acknowledge(header, Ok(())),
            Ok(Answer::Payload(payload, fd)) => self.stream.reply(header.request, &payload, fd),
            Ok(Answer::Later(pending)) => {
                self.pending = Some(pending);
                self.finish_pending(disk).map(|_| ())
            }
            Err(why) if answers(header.request) => Err(ClientError::Refused {
                request: header.request,
                why,
            }),
            Err(why) => self.acknowledge(header, Err(why)),
        }
    }

    /// Has the memory files of a request mapped; [`Session::finish_import`] continues.
    fn import(&mut self, header: Header, request: MemoryRequest, fds: Vec<OwnedFd>) -> Answer {
        self.import = Some(FileImport::new(request, fds));
        Answer::Later(Pending::Import(header))
    }

    /// Continues with a request with memory files. Returns whether that is still the pending one.
    pub(crate) fn finish_import(
        &mut self,
        header: &Header,
        disk: &mut Disk,
    ) -> Result<bool, ClientError> {
        let (memory, waker) = (&mut self.memory, &self.waker);
        let import = self.import.as_mut();
        let advanced = import.map_or(Ok(true), |import| import.advance(memory, waker));
        if advanced == Ok(false) {
            return Ok(true);
        }
        self.pending = None;
        if let Some(import) = self.import.take() {
            let memories = advanced.map(|_| import.memories);
            let handled = self.imported(*header, import.request, memories, disk);
            self.answer(header, handled, disk)?;
        }
        Ok(false)
    }

    /// Handles a request whose memory files are mapped, or could not be.
    fn imported(
        &mut self,
        header: Header,
        request: MemoryRequest,
        memories: Result<Vec<Memory>, MapError>,
        disk: &mut Disk,
    ) -> MessageResult {
        match request {
            MemoryRequest::Table(regions) => {
                let table = memories.map(|memories| regions.into_iter().zip(memories).collect());
                let result = self.memory.replace(table);
                self.memory_changed();
                result?;
                Ok(Answer::Later(Pending::Unmap(header)))
            }
            MemoryRequest::Region(region) => {
                self.memory.add(region, one(memories?)?)?;
                self.memory_changed();
                Ok(Answer::Done)
            }
            MemoryRequest::Inflight(given) => {
                let memory = one(memories?)?;
                self.track(given, memory, disk)
            }
            MemoryRequest::Log(given) => {
                let log = DirtyLog::new(one(memories?)?, &given, &self.stats)?;
                if !log.covers(self.memory.end()) {
                    return Err(RequestRefusal::Value("log smaller than guest memory"));
                }
                self.log = Some(Rc::new(log));
                self.apply_log();
                // The protocol defines no payload: QEMU accepts any, rust-vmm's front-end this one.
                Ok(Answer::Payload(given.as_bytes().to_vec(), None))
            }
        }
    }

    fn request(&mut self, message: Message, disk: &mut Disk) -> MessageResult {
        let Message {
            header,
            payload,
            fds,
        } = message;
        // Only these requests may have descriptors, in any number; those of any other request are
        // closed here.
        match header.request {
            request::SET_MEM_TABLE => return self.set_mem_table(header, &payload, fds),
            request::ADD_MEM_REG => return self.add_mem_reg(header, &payload, fds),
            request::SET_VRING_KICK => return self.set_vring_kick(&payload, fds, disk),
            request::SET_VRING_CALL | request::SET_VRING_ERR => {
                return self.set_vring_signal(header.request, &payload, fds, disk);
            }
            request::SET_BACKEND_REQ_FD => return self.set_backend_channel(fds),
            request::SET_INFLIGHT_FD => return self.set_inflight(header, &payload, fds),
            request::SET_LOG_BASE => return self.set_log_base(header, &payload, fds),
            request::SET_LOG_FD => return self.set_log_fd(fds),
            _ => drop(fds),
        }
        match header.request {
            request::GET_FEATURES => Ok(number(disk.features())),
            request::SET_FEATURES => self.set_features(&payload, disk),
            request::SET_OWNER => Ok(Answer::Done),
            request::GET_PROTOCOL_FEATURES => Ok(number(disk.protocol())),
            request::SET_PROTOCOL_FEATURES => self.set_protocol_features(&payload, disk),
            request::GET_QUEUE_NUM => {
                self.needs(protocol::MQ)?;
                Ok(number(u64::from(disk.shape.queues)))
            }
            request::GET_CONFIG => self.get_config(&payload, disk),
            request::SET_CONFIG => self.set_config(&payload, disk),
            request::SET_VRING_NUM => self.with_state(&payload, disk, Queue::set_size),
            request::SET_VRING_BASE => self.with_state(&payload, disk, Queue::set_base),
            request::SET_VRING_ENABLE => self.with_state(&payload, disk, Queue::set_enabled),
            request::SET_VRING_ADDR => self.set_vring_addr(&payload, disk),
            request::GET_VRING_BASE => self.get_vring_base(header, &payload, disk),
            request::GET_INFLIGHT_FD => self.get_inflight(&payload, disk),
            request::GET_MAX_MEM_SLOTS => {
                self.needs(protocol::CONFIGURE_MEM_SLOTS)?;
                Ok(number(MAX_SLOTS as u64))
            }
            request::REM_MEM_REG => self.remove_mem_reg(header, &payload),
            request::RESET_DEVICE | request::RESET_OWNER => {
                self.stop();
                Ok(Answer::Later(Pending::Reset(header)))
            }
            _ => Err(RequestRefusal::Unknown),
        }
    }

    fn say_not_shared(&self) {
        self.stats.not_shared.line(|left_out| {
            tracing::warn!(
                left_out,
                "guest RAM is not shared with this process, so the guest's requests cannot be \
                 reached and its disk hangs. Start QEMU with: -object \
                 memory-backend-memfd,id=mem,size=...,share=on -machine memory-backend=mem (size: \
                 the guest's RAM); Cloud Hypervisor: --memory size=...,shared=on"
            );
        });
    }

    fn needs(&self, feature: u64) -> Result<(), RequestRefusal> {
        if self.protocol & feature == 0 {
            return Err(RequestRefusal::NotNegotiated);
        }
        Ok(())
    }

    /// Returns the queue with this index, which is created at its first use.
    fn queue(&mut self, index: u64, disk: &Disk) -> Result<&mut Queue, RequestRefusal> {
        let queues = u64::from(disk.shape.queues);
        if index >= queues {
            return Err(RequestRefusal::Ring(index));
        }
        while self.queues.len() as u64 <= index {
            // Queue numbers are below 256.
            let next = self.queues.len() as u16;
            let mut queue = Queue::new(next, self.stats.clone());
            queue.set_features(self.features);
            self.queues.push(queue);
        }
        self.queues
            .get_mut(index as usize)
            .ok_or(RequestRefusal::Ring(index))
    }

    fn with_state(
        &mut self,
        payload: &[u8],
        disk: &Disk,
        set: impl FnOnce(&mut Queue, u32) -> Result<(), RequestRefusal>,
    ) -> MessageResult {
        let state: VringState = exactly(payload).ok_or(RequestRefusal::Size)?;
        set(self.queue(state.index.into(), disk)?, state.num)?;
        Ok(Answer::Done)
    }

    fn set_features(&mut self, payload: &[u8], disk: &mut Disk) -> MessageResult {
        let features: u64 = exactly(payload).ok_or(RequestRefusal::Size)?;
        if features & !disk.features() != 0 {
            return Err(RequestRefusal::Value("features that were not offered"));
        }
        if self.queues.iter().any(|queue| queue.run.is_some())
            && (features ^ self.features) & !(feature::PROTOCOL_FEATURES | feature::LOG_ALL) != 0
        {
            return Err(RequestRefusal::Value("features of a running device"));
        }
        self.features = features;
        for queue in &mut self.queues {
            queue.set_features(features);
        }
        self.apply_log();
        disk.negotiated(features);
        Ok(Answer::Done)
    }

    fn set_protocol_features(&mut self, payload: &[u8], disk: &Disk) -> MessageResult {
        let features: u64 = exactly(payload).ok_or(RequestRefusal::Size)?;
        if features & !disk.protocol() != 0 {
            return Err(RequestRefusal::Value("features that were not offered"));
        }
        self.protocol = features;
        Ok(Answer::Done)
    }

    fn get_config(&mut self, payload: &[u8], disk: &Disk) -> MessageResult {
        self.needs(protocol::CONFIG)?;
        let (header, _): (ConfigHeader, _) = prefix(payload).ok_or(RequestRefusal::Size)?;
        let end = header.offset.checked_add(header.size);
        if end.is_none_or(|end| end > MAX_CONFIG)
            || payload.len() != size_of::<ConfigHeader>() + header.size as usize
        {
            return Err(RequestRefusal::Size);
        }
        let config = disk.config();
        let mut answer = header.as_bytes().to_vec();
        // The rest beyond the configuration space is zero.
        let bytes = config.into_iter().chain(std::iter::repeat(0));
        answer.extend(
            bytes
                .skip(header.offset as usize)
                .take(header.size as usize),
        );
        self.capacity = disk.capacity();
        Ok(Answer::Payload(answer, None))
    }

    fn set_config(&mut self, payload: &[u8], disk: &mut Disk) -> MessageResult {
        self.needs(protocol::CONFIG)?;
        let (header, bytes): (ConfigHeader, _) = prefix(payload).ok_or(RequestRefusal::Size)?;
        if bytes.len() != header.size as usize {
            return Err(RequestRefusal::Size);
        }
        // The only field that a driver may write.
        if let (WRITEBACK_OFFSET, &[writeback]) = (header.offset, bytes) {
            if self.features & feature::CONFIG_WCE == 0 {
                return Err(RequestRefusal::NotNegotiated);
            }
            disk.set_write_cache(writeback != 0, self.features);
            if let Some(inflight) = &self.inflight {
                inflight.set_write_cache(disk.write_cache);
            }
            return Ok(Answer::Done);
        }
        Err(RequestRefusal::Value("field of the device's"))
    }

    fn regions(&self, header: &TableHeader, rest: &[u8]) -> Result<Vec<Region>, RequestRefusal> {
        let count = header.regions as usize;
        if count > MAX_TABLE || rest.len() != count * size_of::<Region>() {
            return Err(RequestRefusal::Size);
        }
        let regions = rest.chunks_exact(size_of::<Region>());
        regions
            .map(|bytes| exactly(bytes).ok_or(RequestRefusal::Size))
            .collect()
    }

    fn set_mem_table(
        &mut self,
        header: Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> MessageResult {
        let (table, rest): (TableHeader, _) = prefix(payload).ok_or(RequestRefusal::Size)?;
        let regions = self.regions(&table, rest)?;
        if fds.is_empty() && !regions.is_empty() {
            return Err(RequestRefusal::NotShared);
        }
        if regions.len() != fds.len() {
            return Err(RequestRefusal::Fds);
        }
        Ok(self.import(header, MemoryRequest::Table(regions), fds))
    }

    fn add_mem_reg(&mut self, header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> MessageResult {
        self.needs(protocol::CONFIGURE_MEM_SLOTS)?;
        let single: SingleRegion = exactly(payload).ok_or(RequestRefusal::Size)?;
        if self.memory.regions() >= MAX_SLOTS {
            return Err(RequestRefusal::Value("one region too many"));
        }
        let request = MemoryRequest::Region(single.region);
        Ok(self.import(header, request, vec![one(fds)?]))
    }

    fn remove_mem_reg(&mut self, header: Header, payload: &[u8]) -> MessageResult {
        self.needs(protocol::CONFIGURE_MEM_SLOTS)?;
        let single: SingleRegion = exactly(payload).ok_or(RequestRefusal::Size)?;
        self.memory.remove(&single.region)?;
        self.memory_changed();
        Ok(Answer::Later(Pending::Unmap(header)))
    }

    fn set_vring_addr(&mut self, payload: &[u8], disk: &Disk) -> MessageResult {
        let addr: VringAddr = exactly(payload).ok_or(RequestRefusal::Size)?;
        if addr.flags & !VRING_LOG != 0 {
            return Err(RequestRefusal::Value("unknown flags of a ring"));
        }
        let log_at = (addr.flags & VRING_LOG != 0).then_some(addr.log);
        let address = RingAddress {
            descriptors: addr.descriptor,
            available: addr.available,
            used: addr.used,
        };
        let queue = self.queue(addr.index.into(), disk)?;
        queue.set_address(address)?;
        queue.set_used_log(log_at);
        self.apply_log();
        Ok(Answer::Done)
    }

    /// Stops a queue (GET_VRING_BASE). The answer follows when the queue's requests have completed.
    fn get_vring_base(&mut self, header: Header, payload: &[u8], disk: &Disk) -> MessageResult {
        let state: VringState = exactly(payload).ok_or(RequestRefusal::Size)?;
        self.queue(state.index.into(), disk)?.stop();
        // There is such a queue, so its number fits.
        Ok(Answer::Later(Pending::Base(header, state.index as u16)))
    }

    /// Returns the index of the ring, and the descriptor unless there is to be none.
    fn vring_fd(
        &self,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<(u64, Option<OwnedFd>), RequestRefusal> {
        let value: u64 = exactly(payload).ok_or(RequestRefusal::Size)?;
        let index = value & VRING_INDEX_MASK;
        if value & VRING_NOFD != 0 {
            return Ok((index, None));
        }
        Ok((index, Some(one(fds)?)))
    }

    fn set_vring_kick(
        &mut self,
        payload: &[u8],
        fds: Vec<OwnedFd>,
        disk: &mut Disk,
    ) -> MessageResult {
        let (index, fd) = self.vring_fd(payload, fds)?;
        let number = u8::try_from(index).map_err(|_| RequestRefusal::Ring(index))?;
        let kick = match fd {
            Some(fd) => Some(Kick::new(fd, &self.descriptors, kick_token(number))?),
            None => None,
        };
        let queue = self.queue(index, disk)?;
        queue.set_kick(kick);
        // The check precedes reading the ring, which may store zeroes there.
        let available = queue.available();
        if available.is_some_and(|address| self.memory.is_untouched(address)) {
            self.say_not_shared();
        }
        // There is such a queue, so its number fits.
        match self.begin(index as u16, disk) {
            Err(RequestRefusal::Address(_)) => Err(RequestRefusal::NotShared),
            begun => begun.map(|()| Answer::Done),
        }
    }

    fn set_vring_signal(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: Vec<OwnedFd>,
        disk: &Disk,
    ) -> MessageResult {
        let (index, fd) = self.vring_fd(payload, fds)?;
        let signal = fd.map(Signal::new).transpose()?;
        let queue = self.queue(index, disk)?;
        if request == request::SET_VRING_CALL {
            queue.set_call(signal);
        } else {
            queue.set_err(signal);
        }
        Ok(Answer::Done)
    }

    fn set_backend_channel(&mut self, fds: Vec<OwnedFd>) -> MessageResult {
        self.needs(protocol::BACKEND_REQ)?;
        let fd = one(fds)?;
        if !receive::kind::is_stream(&fd) {
            return Err(RequestRefusal::WrongKind);
        }
        self.backend_channel = Some(fd);
        Ok(Answer::Done)
    }

    /// Parses the description of an inflight region, which some front-ends send with padding.
    fn inflight_description(&self, payload: &[u8]) -> Result<InflightDescription, RequestRefusal> {
        self.needs(protocol::INFLIGHT_SHMFD)?;
        let mut padded = [0; size_of::<InflightDescription>()];
        if payload.len() != INFLIGHT_SIZE && payload.len() != padded.len() {
            return Err(RequestRefusal::Size);
        }
        if let Some(part) = padded.get_mut(..payload.len()) {
            part.copy_from_slice(payload);
        }
        let description: InflightDescription = exactly(&padded).ok_or(RequestRefusal::Size)?;
        let size = description.queue_size;
        if description.queues == 0 || size == 0 || size > MAX_QUEUE_SIZE {
            return Err(RequestRefusal::Value("queues to be tracked"));
        }
        Ok(description)
    }

    fn get_inflight(&mut self, payload: &[u8], disk: &Disk) -> MessageResult {
        let asked = self.inflight_description(payload)?;
        if asked.queues > disk.shape.queues {
            return Err(RequestRefusal::Ring(asked.queues.into()));
        }
        let inflight = Inflight::new(asked.queues, asked.queue_size)?;
        inflight.set_write_cache(disk.write_cache);
        let answer = InflightDescription {
            mmap_size: inflight.size(),
            mmap_offset: 0,
            ..asked
        };
        let fd = inflight.fd().try_clone_to_owned();
        let fd = fd.map_err(|_| RequestRefusal::Value("no descriptor is left"))?;
        let bytes = answer.as_bytes().get(..payload.len());
        Ok(Answer::Payload(
            bytes.unwrap_or_default().to_vec(),
            Some(fd),
        ))
    }

    fn set_inflight(&mut self, header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> MessageResult {
        let given = self.inflight_description(payload)?;
        if self.queues.iter().any(|queue| queue.run.is_some()) {
            return Err(RequestRefusal::Value("tracking of a running device"));
        }
        let request = MemoryRequest::Inflight(given);
        Ok(self.import(header, request, vec![one(fds)?]))
    }

    /// Sets the dirty log (SET_LOG_BASE), which replaces an earlier one before the answer.
    fn set_log_base(&mut self, header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> MessageResult {
        self.needs(protocol::LOG_SHMFD)?;
        let given: LogDescription = exactly(payload).ok_or(RequestRefusal::Size)?;
        let request = MemoryRequest::Log(given);
        Ok(self.import(header, request, vec![one(fds)?]))
    }

    /// Sets the eventfd that is signalled after pages were marked (SET_LOG_FD).
    fn set_log_fd(&mut self, fds: Vec<OwnedFd>) -> MessageResult {
        self.needs(protocol::LOG_SHMFD)?;
        self.log_signal = Some(Rc::new(Signal::new(one(fds)?)?));
        self.apply_log();
        Ok(Answer::Done)
    }

    /// Tracks requests in the memory of a file that a front-end has kept.
    fn track(
        &mut self,
        given: InflightDescription,
        memory: Memory,
        disk: &mut Disk,
    ) -> MessageResult {
        let inflight = Inflight::import(
            |_| Ok(memory),
            given.mmap_offset,
            given.mmap_size,
            given.queues,
            given.queue_size,
        )?;
        if let Some(on) = inflight.write_cache() {
            disk.set_write_cache(on, self.features);
        }
        self.inflight = Some(inflight);
        Ok(Answer::Done)
    }
}

fn number(value: u64) -> Answer {
    Answer::Payload(value.as_bytes().to_vec(), None)
}

/// Returns the only descriptor of a request, or its memory.
fn one<T>(all: Vec<T>) -> Result<T, RequestRefusal> {
    let mut all = all.into_iter();
    match (all.next(), all.next()) {
        (Some(one), None) => Ok(one),
        _ => Err(RequestRefusal::Fds),
    }
}
