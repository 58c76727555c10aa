-- uses: credentials
-- A process shows its key at the door of its role and host. Those are removed whose processes have
-- not shown theirs for long. One that was only cut off shows its own again.
local reason = rejection_reason(args.host, args.public_key)
if reason then return reject('refused', reason) end
local own = keys_of_role(args.role, args.host)
for public, shown in pairs(read_hash(own)) do
  local shown_ms = tonumber(string.match(shown, '^%d+')) or 0
  if shown_ms < NOW - UNSEEN_MS then redis.call('HDEL', own, public) end
end
store_key(args)
return cjson.encode({revocations = revocation_count()})
