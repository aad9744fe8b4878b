//! Table of the admin commands.
//!
//! A row determines dispatch, the Commands Supported and Effects log page, OACS of Identify
//! Controller, and whether the command cancels a queue migration.
//!
//! # To add an admin command
//!
//! 1. Write a module beside this one with the command's handler and its row, `COMMAND`. Module
//!    `toy`, which only tests contain, is an example. The handler accesses guest memory by
//!    `read_host` and `write_host`.
//! 2. Declare the module in `admin/mod.rs`.
//! 3. Add `super::module::COMMAND` to [`COMMANDS`].
//!
//! `nvme::AdminOpcode` already has the opcode, unless it is vendor specific.
//! `tests/it/supported.rs` compares reported and actual support for every opcode.

use super::AdminResult;
use crate::control::Controller;
use nvme::identify::Oacs;
use nvme::log::CommandEffects;
use nvme::{AdminOpcode as Op, Command};

/// Commands Supported and Effects entry of a command that changes nothing the host has to know in
/// advance.
const NOTHING: CommandEffects = CommandEffects::new();

/// Commands Supported and Effects entry of a command that adds or removes namespaces.
const INVENTORY: CommandEffects = CommandEffects::new().with_nic(true);

/// Commands Supported and Effects entry of a command that erases namespaces.
const ERASES: CommandEffects = CommandEffects::new().with_lbcc(true);
const FORMATS: CommandEffects = ERASES.with_ncc(true);

/// Table of all admin commands, searched by opcode.
static COMMANDS: &[AdminCommand] = &[
    AdminCommand::new(Op::DELETE_IO_SQ, Controller::delete_io_sq, NOTHING).concerning_queues(),
    AdminCommand::new(Op::CREATE_IO_SQ, Controller::create_io_sq, NOTHING).concerning_queues(),
    AdminCommand::new(Op::GET_LOG_PAGE, Controller::get_log_page, NOTHING),
    AdminCommand::new(Op::DELETE_IO_CQ, Controller::delete_io_cq, NOTHING).concerning_queues(),
    AdminCommand::new(Op::CREATE_IO_CQ, Controller::create_io_cq, NOTHING).concerning_queues(),
    AdminCommand::new(Op::IDENTIFY, Controller::identify, NOTHING),
    AdminCommand::new(Op::ABORT, Controller::abort_command, NOTHING).concerning_queues(),
    // Number of Queues reads the queues; interrupt coalescing and the write cache change how they
    // behave.
    AdminCommand::new(Op::SET_FEATURES, Controller::set_features, NOTHING).concerning_queues(),
    AdminCommand::new(Op::GET_FEATURES, Controller::get_features, NOTHING),
    AdminCommand::new(
        Op::ASYNC_EVENT_REQUEST,
        Controller::async_event_request,
        NOTHING,
    ),
    AdminCommand::new(Op::NAMESPACE_MANAGEMENT, Controller::manage, INVENTORY)
        .oacs(Oacs::new().with_nms(true))
        .offered_if(|c| c.config.pool.is_some()),
    AdminCommand::new(Op::DEVICE_SELF_TEST, Controller::device_self_test, NOTHING)
        .oacs(Oacs::new().with_dsts(true)),
    AdminCommand::new(Op::NAMESPACE_ATTACHMENT, Controller::manage, INVENTORY)
        .offered_if(|c| c.config.pool.is_some()),
    AdminCommand::new(Op::KEEP_ALIVE, Controller::keep_alive_command, NOTHING),
    AdminCommand::new(Op::DIRECTIVE_SEND, Controller::directive_send, NOTHING)
        .oacs(Oacs::new().with_dirs(true))
        .offered_if(Controller::has_placement),
    AdminCommand::new(
        Op::DIRECTIVE_RECEIVE,
        Controller::directive_receive,
        NOTHING,
    )
    .oacs(Oacs::new().with_dirs(true))
    .offered_if(Controller::has_placement),
    AdminCommand::new(
        Op::DOORBELL_BUFFER_CONFIG,
        Controller::doorbell_buffer_config,
        NOTHING,
    )
    .concerning_queues()
    .oacs(Oacs::new().with_dbcs(true))
    .offered_if(|c| c.config.shadow_doorbells),
    AdminCommand::new(Op::FORMAT_NVM, Controller::format_nvm, FORMATS)
        .oacs(Oacs::new().with_fnvms(true))
        .offered_if(|c| c.config.erases()),
    AdminCommand::new(Op::SANITIZE, Controller::sanitize, ERASES)
        .offered_if(|c| c.config.sanitizes()),
    AdminCommand::new(Op::GET_LBA_STATUS, Controller::get_lba_status, NOTHING)
        .oacs(Oacs::new().with_glss(true))
        .offered_if(|c| c.config.offer().marks),
    #[cfg(test)]
    super::toy::COMMAND,
];

/// Function that executes an admin command and returns its result, or a status if it fails.
pub(super) type Handler = fn(&mut Controller, &Command) -> AdminResult;

/// Table row of an admin command.
pub(super) struct AdminCommand {
    opcode: Op,
    handler: Handler,
    effects: CommandEffects,
    concerns_queues: bool,
    oacs: Oacs,
    offered: fn(&Controller) -> bool,
}

impl AdminCommand {
    /// Creates the row of a command that every controller supports and that concerns no queue. The
    /// "supported" bit of `effects` is set later.
    pub(super) const fn new(opcode: Op, handler: Handler, effects: CommandEffects) -> Self {
        AdminCommand {
            opcode,
            handler,
            effects,
            concerns_queues: false,
            oacs: Oacs::new(),
            offered: |_| true,
        }
    }

    /// Marks the command as reading or changing queues, so that it waits while a queue migrates to
    /// another worker.
    pub(super) const fn concerning_queues(self) -> Self {
        AdminCommand {
            concerns_queues: true,
            ..self
        }
    }

    /// Sets the OACS bit by which Identify Controller reports support of the command.
    pub(super) const fn oacs(self, oacs: Oacs) -> Self {
        AdminCommand { oacs, ..self }
    }

    /// Restricts the command to controllers for which `offered` returns `true`.
    pub(super) const fn offered_if(self, offered: fn(&Controller) -> bool) -> Self {
        AdminCommand { offered, ..self }
    }
}

/// Returns the handler of a command; `None` when this controller does not support it.
pub(super) fn handler(opcode: Op, controller: &Controller) -> Option<Handler> {
    let command = offered(controller).find(|command| command.opcode == opcode)?;
    Some(command.handler)
}

/// Returns whether the command reads or changes queues.
pub(crate) fn concerns_queues(opcode: Op) -> bool {
    let mut commands = COMMANDS.iter();
    commands.any(|command| command.opcode == opcode && command.concerns_queues)
}

/// Returns the Optional Admin Command Support (OACS) field of Identify Controller.
pub(super) fn oacs(controller: &Controller) -> Oacs {
    let bits = offered(controller).map(|command| command.oacs.into_bits());
    Oacs::from_bits(bits.fold(Oacs::new().into_bits(), |all, bits| all | bits))
}

/// Returns the entries of the Commands Supported and Effects log page.
pub(super) fn effects(controller: &Controller) -> impl Iterator<Item = (Op, CommandEffects)> {
    offered(controller).map(|command| (command.opcode, command.effects.with_csupp(true)))
}

fn offered(controller: &Controller) -> impl Iterator<Item = &'static AdminCommand> {
    COMMANDS
        .iter()
        .filter(move |command| (command.offered)(controller))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn admin_opcodes_are_unique() {
        let opcodes: BTreeSet<u8> = COMMANDS.iter().map(|command| command.opcode.0).collect();
        assert_eq!(opcodes.len(), COMMANDS.len());
    }
}
