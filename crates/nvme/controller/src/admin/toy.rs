//! Example of an admin command added by the recipe of [`table`](super::table), contained only in
//! tests. Besides this module, the recipe changed `mod.rs` and `table.rs`.

use super::table::AdminCommand;
use super::{AdminOutcome, AdminResult};
use crate::control::Controller;
use nvme::identify::Oacs;
use nvme::log::CommandEffects;
use nvme::{AdminOpcode, Command};

/// Opcode of the example: vendor specific, without data transfer ("NVMe Base 2.1", 5).
const OPCODE: AdminOpcode = AdminOpcode(0xc0);

pub(super) const COMMAND: AdminCommand =
    AdminCommand::new(OPCODE, double, CommandEffects::new().with_ncc(true))
        .concerning_queues()
        .oacs(Oacs::new().with_hmlms(true))
        .offered_if(|c| c.config.mdts == 5);

/// Completes the example command, with twice its dword 10 as the result.
fn double(_: &mut Controller, command: &Command) -> AdminResult {
    Ok(AdminOutcome::Done(command.cdw10.get() * 2))
}

mod tests {
    use super::super::{AdminOutcome, table};
    use super::OPCODE;
    use crate::config::ControllerConfig;
    use crate::control::Controller;
    use nvme::cmd::admin::Csi;
    use nvme::log::CommandsSupported;
    use nvme::{AdminOpcode, Command, Status};
    use volume::{Io, IoOptions};
    use zerocopy::FromBytes;

    fn controller(mdts: u8) -> Controller {
        let config = ControllerConfig {
            mdts,
            ..ControllerConfig::default()
        };
        Controller::new(0, config, Vec::new(), &Io::new(IoOptions::default())).unwrap()
    }

    fn log(controller: &Controller) -> CommandsSupported {
        CommandsSupported::read_from_bytes(&controller.commands_supported(Csi::NVM)).unwrap()
    }

    #[test]
    fn new_admin_command_needs_single_row() {
        let mut with = controller(5);
        let mut command = Command::new(OPCODE.0, 1, 0);
        command.cdw10 = 21.into();
        let done = with.dispatch(OPCODE, &command);
        assert!(matches!(done, Ok(AdminOutcome::Done(42))));
        let effects = log(&with).acs[usize::from(OPCODE.0)];
        assert!(effects.csupp() && effects.ncc() && !effects.lbcc());
        assert!(with.identify_controller().oacs.hmlms());
        assert!(with.identify_controller().oacs.dbcs());
        assert!(table::concerns_queues(OPCODE));
        assert!(!table::concerns_queues(AdminOpcode(OPCODE.0 + 1)));
    }

    #[test]
    fn admin_command_not_offered_is_invalid_opcode() {
        let mut without = controller(6);
        let refused = without.dispatch(OPCODE, &Command::new(OPCODE.0, 1, 0));
        assert!(matches!(refused, Err(status) if status.is(Status::INVALID_OPCODE)));
        assert!(!log(&without).acs[usize::from(OPCODE.0)].csupp());
        assert!(!without.identify_controller().oacs.hmlms());
    }
}
