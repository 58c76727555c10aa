-- uses: doors
-- A process shows its key at the door of its role and host. Those are removed whose processes have
-- not shown theirs for long. One that was only cut off shows its own again.
local why = barred(a.host, a.public)
if why then return refuse('refused', why) end
local own = door(a.role, a.host)
for public, shown in pairs(hash(own)) do
  local shown_ms = tonumber(string.match(shown, '^%d+')) or 0
  if shown_ms < NOW - GONE_MS then redis.call('HDEL', own, public) end
end
show_key(a)
return cjson.encode({doors = doors_number()})
