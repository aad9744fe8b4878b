//! Example of a feature added by the recipe of [`table`](super::table), contained only in tests.
//! Besides this module, the recipe changed `table.rs` and the declaration of modules. Its value is
//! that of Write Atomicity, so that it needs no field.

use super::table::{DONE, Feature};
use crate::admin::INVALID_FIELD;
use nvme::feature::Fid;

/// Identifier of the example: vendor specific ("NVMe Base 2.1", Figure 387).
const FID: Fid = Fid(0xc0);

pub(super) const FEATURE: Feature = Feature::new(
    FID,
    |_, get| Ok(get.features.write_atomicity * 2),
    |c, command| {
        let value = command.cdw11.get();
        if value % 2 != 0 {
            return Err(INVALID_FIELD);
        }
        c.admin.features.write_atomicity = value / 2;
        DONE
    },
)
.offered_if(|offer| offer.marks);

mod tests {
    use super::super::{is_supported, supported};
    use super::FID;
    use crate::admin::{AdminOutcome, AdminResult};
    use crate::config::ControllerConfig;
    use crate::control::Controller;
    use crate::engine::commands::Offer;
    use nvme::cmd::admin::{FeatureCapabilities, FeatureSelect, GetFeaturesCdw10};
    use nvme::{AdminOpcode, Command, Status};
    use volume::{Io, IoOptions};

    /// Executes Get Features for the example.
    fn get(controller: &mut Controller, select: FeatureSelect) -> u32 {
        let mut command = Command::new(AdminOpcode::GET_FEATURES.0, 1, 0);
        let cdw10 = GetFeaturesCdw10::new().with_fid(FID).with_sel(select);
        command.cdw10 = cdw10.into_bits().into();
        match controller.get_features(&command) {
            Ok(AdminOutcome::Done(value)) => value,
            _ => panic!("not done"),
        }
    }

    /// Executes Set Features for the example. `sv` is the bit Save.
    fn set(controller: &mut Controller, value: u32, sv: bool) -> AdminResult {
        let mut command = Command::new(AdminOpcode::SET_FEATURES.0, 1, 0);
        command.cdw10 = (u32::from(FID.0) | u32::from(sv) << 31).into();
        command.cdw11 = value.into();
        controller.set_features(&command)
    }

    #[test]
    fn new_feature_needs_single_row() {
        let config = ControllerConfig::default();
        let io = Io::new(IoOptions::default());
        let mut c = Controller::new(0, config, Vec::new(), &io).unwrap();
        assert!(matches!(set(&mut c, 42, false), Ok(AdminOutcome::Done(0))));
        assert_eq!(get(&mut c, FeatureSelect::CURRENT), 42);
        assert_eq!(get(&mut c, FeatureSelect::DEFAULT), 0);
        let refused = set(&mut c, 41, false);
        assert!(matches!(refused, Err(status) if status.is(Status::INVALID_FIELD)));
        let refused = set(&mut c, 2, true);
        assert!(matches!(refused, Err(status) if status.is(Status::FEATURE_NOT_SAVEABLE)));
        assert_eq!(get(&mut c, FeatureSelect::CURRENT), 42);
        let capabilities = FeatureCapabilities::new().with_changeable(true);
        let reported = get(&mut c, FeatureSelect::SUPPORTED_CAPABILITIES);
        assert_eq!(reported, capabilities.into_bits());
        let listed = supported(c.engine.offer()).find(|(fid, _)| *fid == FID);
        assert_eq!(listed.map(|(_, found)| found.into_bits()), Some(reported));
    }

    #[test]
    fn feature_not_offered_is_unsupported() {
        let offer = |marks| Offer {
            shared: false,
            placed: false,
            marks,
        };
        assert!(is_supported(FID, offer(true)));
        assert!(!is_supported(FID, offer(false)));
    }
}
