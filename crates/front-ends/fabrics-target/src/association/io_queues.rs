//! I/O queues of an association, from their connection to their deletion.

use super::*;

impl Association {
    /// Handles a new connection of the host for an I/O queue.
    pub(super) fn arrive(&mut self, connected: Connected) {
        let limits = self.target.config.limits;
        let (qid, entries_z) = (connected.connect.qid, connected.connect.sqsize_z);
        let mut early = self.early.iter();
        let taken = self.io.iter().any(|queue| queue.qid == qid)
            || early.any(|connected| connected.connect.qid == qid);
        let refuse = |why: Status, dw0| {
            connected.refuse(why, dw0);
            self.target.stats().refused.count();
        };
        let is_open = self.life == AssociationState::Open && self.admin.proof.is_given();
        if !is_open || !self.controller.is_ready() || self.flushing {
            return refuse(Status::COMMAND_SEQUENCE_ERROR, 0);
        }
        if !(1..=limits.queues).contains(&qid) || taken {
            return refuse(status::CONNECT_INVALID_PARAMETERS, invalid(42, false));
        }
        if entries_z == 0 || entries_z >= limits.entries {
            return refuse(status::CONNECT_INVALID_PARAMETERS, invalid(44, false));
        }
        // Creation of both rings is requested together, so two slots are needed.
        if !self.admin.slots.has_room()
            || self.admin.slots.len() + 2 > usize::from(ADMIN_ENTRIES) * 2
        {
            self.early.push(connected);
            return;
        }
        let Ok(fd) = rustix::io::fcntl_dupfd_cloexec(&connected.fd, 0) else {
            return refuse(Status::NOT_ENOUGH_RESOURCES, 0);
        };
        let link = Link::new(
            &self.streams,
            &self.descriptors,
            qid.into(),
            fd,
            connected.limits,
        );
        let proof = self.target.proof(&self.hostnqn, self.now);
        let (Ok(link), Ok(proof)) = (link, proof) else {
            return refuse(Status::NOT_ENOUGH_RESOURCES, 0);
        };
        let entries = entries_z + 1;
        let flow_control = !connected.connect.cattr.dsqfc();
        let mut queue = Queue::new(
            link,
            &connected.limits,
            qid,
            entries,
            limits.in_capsule,
            flow_control,
        );
        queue.proof = proof;
        queue.phase = Phase::Making { cid: connected.cid };
        queue.rings.reset(self.pool.memory());
        let [cq, sq] = create(&queue.rings, qid);
        let asked = self.admin.ask(cq, qid, QueueStep::CreateCq, &self.pool)
            && self.admin.ask(sq, qid, QueueStep::CreateSq, &self.pool);
        if !asked {
            queue.close(&ConnectionEnd::Refused("no room"), &mut self.pool);
        }
        self.io.push(queue);
    }

    /// Handles the completion of a command of this side that creates or deletes a ring.
    pub(super) fn answered(&mut self, qid: u16, step: QueueStep, status: Status) {
        let Some(queue) = self.io.iter_mut().find(|queue| queue.qid == qid) else {
            return;
        };
        match (step, queue.phase, status.is_success()) {
            (QueueStep::CreateSq, Phase::Making { cid }, true) => {
                queue.phase = Phase::Open;
                self.target.stats().connections.count();
                let answer = fabrics::Connected::new()
                    .with_cntlid(self.cntlid)
                    .with_atr(!queue.proof.is_given());
                let entry = Completion {
                    dw0: answer.into_bits().into(),
                    sqhd: if queue.has_flow_control() {
                        0
                    } else {
                        SQHD_NO_FLOW_CONTROL
                    }
                    .into(),
                    cid: cid.into(),
                    status_phase: Completion::pack_status(Status::SUCCESS, false),
                    ..Completion::default()
                };
                let capsule = queue.link.writer.completion(&entry);
                queue.link.header(&capsule);
            }
            (QueueStep::CreateCq | QueueStep::CreateSq, Phase::Making { .. }, false) => {
                let log = &self.target.log.refused;
                log.line(|left_out| {
                    tracing::warn!(left_out, qid, %status, "no rings for a host's queue");
                });
                queue.close(&ConnectionEnd::Refused("no rings"), &mut self.pool);
                queue.phase = Phase::Removing;
                self.remove(qid, step == QueueStep::CreateSq);
            }
            // The connection has ended before the rings were created.
            (QueueStep::CreateSq, Phase::Removing, created) => self.remove(qid, created),
            (QueueStep::DeleteSq, ..) => {
                let delete = delete(AdminOpcode::DELETE_IO_CQ, qid);
                if !self.admin.ask(delete, qid, QueueStep::DeleteCq, &self.pool) {
                    queue.phase = Phase::Ended;
                }
            }
            (QueueStep::DeleteCq, ..) => queue.phase = Phase::Gone,
            _ => {}
        }
    }

    /// Requests that the controller deletes the rings of a queue; `with_sq` is whether the
    /// submission queue exists.
    pub(super) fn remove(&mut self, qid: u16, with_sq: bool) {
        let Some(queue) = self.io.iter_mut().find(|queue| queue.qid == qid) else {
            return;
        };
        let (opcode, step) = if with_sq {
            (AdminOpcode::DELETE_IO_SQ, QueueStep::DeleteSq)
        } else {
            (AdminOpcode::DELETE_IO_CQ, QueueStep::DeleteCq)
        };
        queue.phase = if self.admin.ask(delete(opcode, qid), qid, step, &self.pool) {
            Phase::Removing
        } else {
            // The deletion is requested later, when a slot is free.
            Phase::Ended
        };
    }

    pub(super) fn read_io(&mut self) -> bool {
        let mut worked = false;
        let max_transfer = self.max_transfer();
        let Self {
            target,
            controller,
            pool,
            io,
            inbox,
            hostnqn,
            peer,
            ..
        } = self;
        for queue in io.iter_mut().filter(|queue| queue.phase == Phase::Open) {
            let mut around = QueueContext {
                controller,
                pool,
                max_transfer,
                prover: target.prover.as_ref(),
                inbox,
            };
            let state = target.ana.state();
            let decide = |command: &Command, _: &mut Controller| {
                decide_io(command, state, &target.config.namespaces)
            };
            match queue.read(&mut around, decide) {
                Ok(found) => worked |= found,
                Err(why) => {
                    worked = true;
                    target.log.ended.line(|left_out| {
                        let qid = queue.qid;
                        tracing::info!(left_out, qid, "an I/O queue ends: {why}");
                    });
                    queue.close(&why, pool);
                }
            }
            if let Some(why) = queue.refusal.take() {
                target.not_proven(hostnqn, *peer, &why);
            }
            queue.feed(&mut QueueContext {
                controller,
                pool,
                max_transfer,
                prover: target.prover.as_ref(),
                inbox,
            });
            queue.rings.ring(controller);
        }
        worked
    }

    /// Continues the deletion of I/O queues that are ending. Returns whether there was progress.
    pub(super) fn end_queues(&mut self) -> bool {
        let mut worked = false;
        let ended: Vec<u16> = self
            .io
            .iter()
            .filter(|queue| queue.phase == Phase::Ended)
            .map(|queue| queue.qid)
            .collect();
        for qid in ended {
            if self.controller.is_ready() && self.life == AssociationState::Open && !self.resetting
            {
                self.remove(qid, true);
                worked = true;
            }
        }
        let pool = &mut self.pool;
        self.io.retain_mut(|queue| {
            if matches!(queue.phase, Phase::Open | Phase::Making { .. }) {
                return true;
            }
            if queue.has_news() {
                queue.drain(pool);
                worked = true;
            }
            let gone = queue.phase == Phase::Gone && queue.is_quiet();
            if gone {
                queue.release(pool);
                worked = true;
            }
            !gone
        });
        worked
    }
}
